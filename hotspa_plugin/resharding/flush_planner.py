"""Planning flushes: the adjoint of the switch, with every gradient counted exactly as often as it must be."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable, shard_table
from hotspa_plugin.resharding.plan import ReshardPlan, Routes
from hotspa_plugin.resharding.planner import occurrence
from hotspa_plugin.resharding.spread import balanced_routes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupCopies:
    """All copies of one group's cells under one layout, one entry per copy, by rank."""

    rank: np.ndarray
    nth: np.ndarray
    dp_rank: np.ndarray
    tp_copy: np.ndarray
    stage_copy: np.ndarray
    identical: np.ndarray

    def select(self, rows: np.ndarray) -> GroupCopies:
        return GroupCopies(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    @property
    def is_identical(self) -> bool:
        """Whether there are copies along tensor parallel, and they hold the same gradient."""
        return bool(self.identical.any() and len(np.unique(self.tp_copy)) > 1)


def copies_of_group(cells: CellTable, side: int, group: int, layout: ShardLayout) -> GroupCopies:
    """Who holds a group's cells in one of the plan's two layouts."""
    holders, table = cells.sides[side], shard_table(layout)
    rows = holders.of_cell(int(cells.first_of_group[group]))
    holding, shard = holders.holding[rows], holders.shard[rows]
    nth = np.arange(len(holding)) - np.searchsorted(holding, holding)
    ranks_of = [np.flatnonzero(layout.holding_of_rank == h) for h in holding]
    each = np.repeat(np.arange(len(holding)), [len(ranks) for ranks in ranks_of])
    at = table.row(holding, shard)[each]
    rank = np.concatenate(ranks_of)
    copies = GroupCopies(
        rank=rank,
        nth=nth[each],
        dp_rank=layout.dp_rank[rank],
        tp_copy=table.tp_copy[at],
        stage_copy=table.stage_copy[at],
        identical=table.identical[at],
    )
    return copies.select(np.lexsort((copies.nth, copies.rank)))


def build_flush_plan(strategy: ShardLayout, home: ShardLayout, switch_plan: ReshardPlan) -> ReshardPlan:
    """The additions that bring a strategy's gradients home: the adjoint of ``switch_plan`` (home to strategy).

    The gradients of trainable tensors only are flushed. Where neither side has identical tensor-parallel copies
    and home has no second stage copy, the switch is run backwards, adding. Elsewhere: of a strategy's identical
    copies one per data-parallel replica and stage copy is read, of partial ones all; home receives in its first
    stage copy only, and there in one partial copy, or in all identical copies of one data-parallel replica.

    Raises ValueError where ``switch_plan`` does not lead from ``home`` to ``strategy``.
    """
    if switch_plan.accumulate or switch_plan.source is not home or switch_plan.destination is not strategy:
        raise ValueError(
            f"the flush from {strategy.label} to {home.label} needs the switch plan from {home.label} to "
            f"{strategy.label}, built from the same two layouts"
        )
    cells = switch_plan.cells.swapped()
    nodes = switch_plan.node_of_rank
    received = np.zeros(strategy.num_ranks, dtype=np.int64)  # what direct additions bring, to spread them
    plain = np.zeros(cells.num_groups, dtype=bool)
    tied: list[int] = []
    direct: list[tuple[int, Routes]] = []
    repeated = _groups_held_repeatedly(cells)
    for group in np.flatnonzero(cells.trainable).tolist():
        ours = copies_of_group(cells, SOURCE, group, strategy)
        theirs = copies_of_group(cells, DESTINATION, group, home)
        if ours.is_identical or theirs.is_identical or (theirs.stage_copy.any() and repeated[group]):
            direct += _flush_group(cells, group, ours, theirs, nodes, received)
        elif theirs.stage_copy.any():
            tied.append(group)
        else:
            plain[group] = True
    routes = switch_plan.routes.select(plain[switch_plan.group_of_routes])
    if tied:
        # A second stage copy at home must not receive: plan these anew from the first copies alone.
        holders = switch_plan.cells.sides[SOURCE]
        first_copy = shard_table(home).stage_copy[shard_table(home).row(holders.holding, holders.shard)] == 0
        again = balanced_routes(
            switch_plan.cells, home, strategy, switch_plan.node_of_rank, switch_plan.card_of_rank, tied, first_copy
        )
        routes = Routes.concatenate([routes, again])
    hops = max([int(routes.hop.max(initial=0)) + 1, *(later + 1 for later, _ in direct)])
    adjoint = Routes.build(
        hop=hops - 1 - routes.hop,
        source_rank=routes.destination_rank,
        source_side=1 - routes.destination_side,
        source_nth=routes.destination_nth,
        destination_rank=routes.source_rank,
        destination_side=1 - routes.source_side,
        destination_nth=routes.source_nth,
        start=routes.start,
        stop=routes.stop,
    )
    special = [dataclasses.replace(r, hop=np.full(len(r), hops - 1 - later, dtype=np.int8)) for later, r in direct]
    return ReshardPlan(
        source=strategy,
        destination=home,
        policy=switch_plan.policy,
        cells=cells,
        routes=Routes.concatenate([adjoint, *special]),
        node_of_rank=switch_plan.node_of_rank,
        card_of_rank=switch_plan.card_of_rank,
        accumulate=True,
    )


def _groups_held_repeatedly(cells: CellTable) -> np.ndarray:
    """Mask of the groups that some rank holds in more than one shard of one layout."""
    found = np.zeros(cells.num_groups, dtype=bool)
    for side in cells.sides:
        found[cells.group[side.cell[occurrence(side) > 0]]] = True
    return found


def read_copies(copies: GroupCopies, home_ranks: set[int]) -> GroupCopies:
    """The strategy's copies that are read: all, or one of each set of identical ones, at home where possible."""
    if not copies.is_identical:
        return copies
    chosen = []
    for dp_rank in np.unique(copies.dp_rank):
        for stage_copy in np.unique(copies.stage_copy):
            rows = np.flatnonzero((copies.dp_rank == dp_rank) & (copies.stage_copy == stage_copy))
            if len(rows):
                near = [row for row in rows.tolist() if int(copies.rank[row]) in home_ranks] or rows.tolist()
                chosen.append(near[int(dp_rank) % len(near)])
    return copies.select(np.array(sorted(chosen)))


def _flush_group(
    cells: CellTable, group: int, ours: GroupCopies, theirs: GroupCopies, nodes: np.ndarray, received: np.ndarray
) -> list[tuple[int, Routes]]:
    """Additions for a group with identical copies, or held repeatedly, each with how many hops come after it.

    Where many contributions must reach several identical copies, those of one node meet first in the strategy's
    own gradient of one of its ranks, and go on as one sum. ``received`` counts what was brought to each rank.
    """
    targets = theirs.select(theirs.stage_copy == 0)
    row_of_rank = {rank: row for row, rank in enumerate(targets.rank.tolist())}
    readers = read_copies(ours, set(row_of_rank))
    start, stop = cells.bounds_of_group(group)
    node_of_target = nodes[targets.rank]

    def receiving(rank: int) -> np.ndarray:
        """Home copies that rank ``rank`` adds to: its own, else the least burdened of its node, else of all."""
        row = row_of_rank.get(rank)
        if row is None:
            pool = np.flatnonzero(node_of_target == nodes[rank])
            pool = pool if len(pool) else np.arange(len(targets.rank))
            row = int(pool[np.argmin(received[targets.rank[pool]])])
        return np.flatnonzero(targets.dp_rank == targets.dp_rank[row]) if targets.is_identical else np.array([row])

    def remote(rank: int, rows: np.ndarray) -> int:
        return int(np.count_nonzero(targets.rank[rows] != rank))

    meetings: list[tuple[int, int]] = []  # (reader, reader whose gradient takes its sum)
    final: list[tuple[int, int]] = []  # (reader, target)
    node_of_reader = nodes[readers.rank]
    for node in np.unique(node_of_reader):
        members = np.flatnonzero(node_of_reader == node).tolist()
        if targets.is_identical and len(members) > 1:
            lead = next((m for m in members if int(readers.rank[m]) in row_of_rank), members[0])
            met = len(members) - 1 + remote(int(readers.rank[lead]), receiving(int(readers.rank[lead])))
            if met < sum(remote(int(readers.rank[m]), receiving(int(readers.rank[m]))) for m in members):
                meetings += [(m, lead) for m in members if m != lead]
                members = [lead]
        for member in members:
            rank = int(readers.rank[member])
            rows = receiving(rank)
            final += [(member, int(row)) for row in rows]
            received[targets.rank[rows]] += (stop - start) * (targets.rank[rows] != rank)

    def routes(pairs: list[tuple[int, int]], takers: GroupCopies, side: int) -> Routes:
        sources, sinks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return Routes.build(
            source_rank=readers.rank[sources],
            source_nth=readers.nth[sources],
            destination_rank=takers.rank[sinks],
            destination_side=side,
            destination_nth=takers.nth[sinks],
            start=np.full(len(pairs), start),
            stop=np.full(len(pairs), stop),
        )

    found = [(0, routes(final, targets, DESTINATION))]
    if meetings:
        found.append((1, routes(meetings, readers, SOURCE)))
    return found
