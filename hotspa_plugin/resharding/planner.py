"""Planning: which rank sends which piece to whom when parameters switch strategies, and gradients come home."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable, Incidences, cut_cells, shard_table
from hotspa_plugin.resharding.plan import ReshardPlan, Routes
from hotspa_plugin.resharding.policies import SEQUENTIAL_POLICIES, choose_sequentially


def check_nodes(node_of_rank: np.ndarray | None, num_ranks: int) -> np.ndarray:
    """The node of each rank, one node where none was given; ValueError where the count is wrong."""
    if node_of_rank is None:
        return np.zeros(num_ranks, dtype=np.int64)
    nodes = np.asarray(node_of_rank, dtype=np.int64)
    if nodes.shape != (num_ranks,):
        raise ValueError(f"node_of_rank has shape {list(nodes.shape)} but there are {num_ranks} ranks: give one each")
    return np.unique(nodes, return_inverse=True)[1].reshape(-1)


def build_switch_plan(
    source: ShardLayout,
    destination: ShardLayout,
    *,
    policy: str = "balanced",
    node_of_rank: np.ndarray | None = None,
) -> ReshardPlan:
    """The copies that fill every shard of ``destination`` from the shards of ``source``.

    A rank that holds a piece in ``source`` reads its own copy; all other pieces are received from a sender
    that ``policy`` picks among the piece's holders, which are equal sources. ``node_of_rank`` is an int array
    of shape ``[num_ranks]``; by default all ranks share one node.

    Raises ValueError where the layouts differ in ranks or tensors, where nobody holds a region that is needed,
    and for an unknown policy.
    """
    if source.num_ranks != destination.num_ranks:
        raise ValueError(
            f"layout {source.label} has {source.num_ranks} ranks but layout {destination.label} has "
            f"{destination.num_ranks}: a switch keeps all ranks"
        )
    if policy not in SEQUENTIAL_POLICIES:
        raise ValueError(f"policy {policy!r} is unknown: choose one of {', '.join(SEQUENTIAL_POLICIES)}")
    nodes = check_nodes(node_of_rank, source.num_ranks)
    cells = cut_cells(source, destination)
    routes = choose_sequentially(cells, source, destination, nodes, policy)
    extra = _repeated_holdings(cells, destination, hop=int(routes.hop.max(initial=0)) + 1)
    routes = Routes.concatenate([routes, *extra])
    return ReshardPlan(source=source, destination=destination, policy=policy, cells=cells, routes=routes)


def _nth(holders: Incidences) -> np.ndarray:
    """How many shards of the same holding that cover the same cell come before each incidence."""
    if len(holders.key) == 0:
        return np.zeros(0, dtype=np.int64)
    return np.arange(len(holders.key)) - np.searchsorted(holders.key, holders.key)


def _repeated_holdings(cells: CellTable, destination: ShardLayout, *, hop: int) -> list[Routes]:
    """Local copies for ranks that hold a cell in more than one shard: the first is filled, then the others from it."""
    holders = cells.sides[DESTINATION]
    found = []
    for index in np.flatnonzero(_nth(holders)):
        ranks = np.flatnonzero(destination.holding_of_rank == holders.holding[index])
        cell = holders.cell[index]
        found.append(
            Routes.build(
                hop=hop,
                source_rank=ranks,
                source_side=DESTINATION,
                destination_rank=ranks,
                destination_nth=int(_nth(holders)[index]),
                start=np.full(len(ranks), cells.start[cell]),
                stop=np.full(len(ranks), cells.start[cell + 1]),
            )
        )
    return found


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
    routes = switch_plan.routes
    group_of_route = cells.group[np.searchsorted(cells.start, routes.start, side="right") - 1]
    last_hop = switch_plan.num_hops - 1
    received = np.zeros(strategy.num_ranks, dtype=np.int64)  # what special groups bring, to spread them
    direct: list[Routes] = []
    plain = np.zeros(cells.num_groups, dtype=bool)
    for group in np.flatnonzero(cells.trainable).tolist():
        ours = copies_of_group(cells, SOURCE, group, strategy)
        theirs = copies_of_group(cells, DESTINATION, group, home)
        plain[group] = not (ours.is_identical or theirs.is_identical or theirs.stage_copy.any())
        if not plain[group]:
            rows = group_of_route == group
            sender = dict(zip(routes.destination_rank[rows].tolist(), routes.source_rank[rows].tolist(), strict=True))
            direct.append(_flush_group(cells, group, ours, theirs, sender, received, last_hop))
    picked = routes.select(plain[group_of_route])
    adjoint = Routes.build(
        hop=last_hop - picked.hop,
        source_rank=picked.destination_rank,
        source_side=1 - picked.destination_side,
        source_nth=picked.destination_nth,
        destination_rank=picked.source_rank,
        destination_side=1 - picked.source_side,
        destination_nth=picked.source_nth,
        start=picked.start,
        stop=picked.stop,
    )
    return ReshardPlan(
        source=strategy,
        destination=home,
        policy=switch_plan.policy,
        cells=cells,
        routes=Routes.concatenate([adjoint, *direct]),
        accumulate=True,
    )


def _readers(copies: GroupCopies, home_ranks: set[int]) -> GroupCopies:
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
    cells: CellTable,
    group: int,
    ours: GroupCopies,
    theirs: GroupCopies,
    sender: dict[int, int],
    received: np.ndarray,
    hop: int,
) -> Routes:
    """Direct additions for a group with identical copies or with a second stage copy at home."""
    targets = theirs.select(theirs.stage_copy == 0)
    row_of_rank = {rank: row for row, rank in enumerate(targets.rank.tolist())}
    readers = _readers(ours, set(row_of_rank))
    start, stop = cells.bounds_of_group(group)
    sources, destinations = [], []
    for reader, rank in enumerate(readers.rank.tolist()):
        wanted = rank if rank in row_of_rank else sender.get(rank)
        row = row_of_rank.get(wanted)
        if row is None:
            row = min(range(len(targets.rank)), key=lambda r: (received[targets.rank[r]], r))
        rows = [row]
        if targets.is_identical:
            rows = np.flatnonzero(targets.dp_rank == targets.dp_rank[row]).tolist()
        for target in rows:
            sources.append(reader)
            destinations.append(target)
            received[targets.rank[target]] += (stop - start) * (targets.rank[target] != rank)
    return Routes.build(
        hop=hop,
        source_rank=readers.rank[sources],
        source_nth=readers.nth[sources],
        destination_rank=targets.rank[destinations],
        destination_nth=targets.nth[destinations],
        start=np.full(len(sources), start),
        stop=np.full(len(sources), stop),
    )
