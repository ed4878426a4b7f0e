"""Sender policies that walk over the cells one by one and pick a sender for every rank that lacks one.

``fcfs``, ``round_robin``, ``multi_node_round_robin``, ``greedy`` and ``new_greedy`` are those of HotSPa
(Ge et al., SOSP 2024, doi 10.1145/3694715.3695969), kept for comparison: they count elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable
from hotspa_plugin.resharding.plan import Routes

Chooser = Callable[[int, Sequence[int], int, int], int]  # slice, its owners, receiver, elements -> owner


def _fcfs(num_ranks: int, node: list[int]) -> Chooser:
    return lambda piece, owners, receiver, elements: owners[0]


def _round_robin(num_ranks: int, node: list[int]) -> Chooser:
    turn: dict[int, int] = {}

    def choose(piece: int, owners: Sequence[int], receiver: int, elements: int) -> int:
        count = turn.get(piece, 0)
        turn[piece] = count + 1
        return owners[count % len(owners)]

    return choose


def _multi_node_round_robin(num_ranks: int, node: list[int]) -> Chooser:
    turn: dict[int, int] = {}

    def choose(piece: int, owners: Sequence[int], receiver: int, elements: int) -> int:
        count = turn.get(piece, 0)
        near = any(node[owner] == node[receiver] for owner in owners)
        while near and node[owners[count % len(owners)]] != node[receiver]:
            count += 1
        turn[piece] = count + 1
        return owners[count % len(owners)]

    return choose


def _greedy(num_ranks: int, node: list[int]) -> Chooser:
    used: dict[tuple[int, int], int] = {}

    def choose(piece: int, owners: Sequence[int], receiver: int, elements: int) -> int:
        owner = min(owners, key=lambda o: used.get((o, receiver), 0))
        used[owner, receiver] = used.get((owner, receiver), 0) + 1
        return owner

    return choose


def _new_greedy(num_ranks: int, node: list[int]) -> Chooser:
    inside, across = [0] * num_ranks, [0] * num_ranks

    def choose(piece: int, owners: Sequence[int], receiver: int, elements: int) -> int:
        near = [owner for owner in owners if node[owner] == node[receiver]]
        sent = inside if near else across
        owner = min(near or owners, key=sent.__getitem__)
        sent[owner] += elements
        return owner

    return choose


SEQUENTIAL_POLICIES: dict[str, Callable[[int, list[int]], Chooser]] = {
    "fcfs": _fcfs,
    "round_robin": _round_robin,
    "multi_node_round_robin": _multi_node_round_robin,
    "greedy": _greedy,
    "new_greedy": _new_greedy,
}


def ranks_by_holding(layout: ShardLayout) -> list[list[int]]:
    """The ranks that share each holding, ascending."""
    found: list[list[int]] = [[] for _ in layout.holdings]
    for rank, holding in enumerate(layout.holding_of_rank.tolist()):
        found[holding].append(rank)
    return found


def holders_of_group(cells: CellTable, side: int, group: int, ranks_of: list[list[int]]) -> list[int]:
    """The ranks that hold a group's cells in one of the layouts, ascending."""
    holdings = np.unique(cells.sides[side].holding[cells.sides[side].of_cell(int(cells.first_of_group[group]))])
    return sorted(rank for holding in holdings.tolist() for rank in ranks_of[holding])


def choose_sequentially(
    cells: CellTable, source: ShardLayout, destination: ShardLayout, node_of_rank: np.ndarray, policy: str
) -> Routes:
    """One route per cell and rank that holds it in ``destination``: local where possible, else as the policy says."""
    node = node_of_rank.tolist()
    choose = SEQUENTIAL_POLICIES[policy](source.num_ranks, node)
    ranks_of = ranks_by_holding(source), ranks_by_holding(destination)
    owners_of = [holders_of_group(cells, SOURCE, g, ranks_of[SOURCE]) for g in range(cells.num_groups)]
    receivers_of = [holders_of_group(cells, DESTINATION, g, ranks_of[DESTINATION]) for g in range(cells.num_groups)]
    own = [set(owners) for owners in owners_of]
    order = np.lexsort((*(cells.low[:, d] for d in range(cells.low.shape[1] - 1, -1, -1)), cells.tensor))
    starts, groups = cells.start.tolist(), cells.group.tolist()
    senders, takers, begins, ends = [], [], [], []
    for cell in order.tolist():
        group = groups[cell]
        owners = owners_of[group]
        elements = starts[cell + 1] - starts[cell]
        for receiver in receivers_of[group]:
            local = receiver in own[group]
            senders.append(receiver if local else choose(cell, owners, receiver, elements))
            takers.append(receiver)
            begins.append(starts[cell])
            ends.append(starts[cell + 1])
    return Routes.build(
        source_rank=np.array(senders, dtype=np.int32),
        destination_rank=np.array(takers, dtype=np.int32),
        start=np.array(begins, dtype=np.int64),
        stop=np.array(ends, dtype=np.int64),
    )
