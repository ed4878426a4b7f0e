"""Planning: which rank sends which piece to whom when parameters switch strategies, and gradients come home."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable, Incidences, cut_cells, shard_table
from hotspa_plugin.resharding.plan import ReshardPlan, Routes
from hotspa_plugin.resharding.policies import SEQUENTIAL_POLICIES, choose_sequentially
from hotspa_plugin.resharding.spread import balanced_routes

POLICIES = ("balanced", *SEQUENTIAL_POLICIES)


def check_topology(
    node_of_rank: np.ndarray | None, card_of_rank: np.ndarray | None, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Node and network card of each rank, numbered from 0; one node, and one card a node, where none were given.

    Raises ValueError where a count is wrong or two nodes share a card.
    """
    found = []
    for name, given, default in (
        ("node_of_rank", node_of_rank, np.zeros(num_ranks, dtype=np.int64)),
        ("card_of_rank", card_of_rank, node_of_rank if node_of_rank is not None else np.zeros(num_ranks)),
    ):
        values = np.asarray(default if given is None else given).astype(np.int64)
        if values.shape != (num_ranks,):
            raise ValueError(f"{name} has shape {list(values.shape)} but there are {num_ranks} ranks: give one each")
        found.append(np.unique(values, return_inverse=True)[1].reshape(-1))
    nodes, cards = found
    pairs = np.unique(np.stack([cards, nodes]), axis=1)
    if pairs.shape[1] != len(np.unique(cards)):
        raise ValueError("card_of_rank puts ranks of two nodes on one network card: number cards over all nodes")
    return nodes, cards


def build_switch_plan(
    source: ShardLayout,
    destination: ShardLayout,
    *,
    policy: str = "balanced",
    node_of_rank: np.ndarray | None = None,
    card_of_rank: np.ndarray | None = None,
) -> ReshardPlan:
    """The copies that fill every shard of ``destination`` from the shards of ``source``.

    A rank that holds a piece in ``source`` reads its own copy; all other pieces are received from a sender
    that ``policy`` picks among the piece's holders, which are equal sources; ``balanced`` also lets a piece that
    a node lacks enter it once and be passed on inside (a second hop). ``node_of_rank`` is an int array of shape
    ``[num_ranks]``; by default all ranks share one node. ``card_of_rank`` says in the same way which network card
    a rank uses (numbered over all nodes); by default each node has one.

    Raises ValueError where the layouts differ in ranks or tensors, where nobody holds a region that is needed,
    and for an unknown policy.
    """
    if source.num_ranks != destination.num_ranks:
        raise ValueError(
            f"layout {source.label} has {source.num_ranks} ranks but layout {destination.label} has "
            f"{destination.num_ranks}: a switch keeps all ranks"
        )
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown: choose one of {', '.join(POLICIES)}")
    nodes, cards = check_topology(node_of_rank, card_of_rank, source.num_ranks)
    cells = cut_cells(source, destination)
    if policy == "balanced":
        routes = balanced_routes(cells, source, destination, nodes, cards)
    else:
        routes = choose_sequentially(cells, source, destination, nodes, policy)
    extra = _repeated_holdings(cells, destination, hop=int(routes.hop.max(initial=0)) + 1)
    routes = Routes.concatenate([routes, *extra])
    return ReshardPlan(
        source=source, destination=destination, policy=policy, cells=cells, routes=routes, node_of_rank=nodes,
        card_of_rank=cards,
    )


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
    hops = switch_plan.num_hops
    received = np.zeros(strategy.num_ranks, dtype=np.int64)  # what direct additions bring, to spread them
    plain = np.zeros(cells.num_groups, dtype=bool)
    tied, special = [], []
    repeated = _groups_held_repeatedly(cells)
    for group in np.flatnonzero(cells.trainable).tolist():
        ours = copies_of_group(cells, SOURCE, group, strategy)
        theirs = copies_of_group(cells, DESTINATION, group, home)
        if ours.is_identical or theirs.is_identical or (theirs.stage_copy.any() and repeated[group]):
            special.append((group, ours, theirs))
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
        hops = max(hops, int(routes.hop.max(initial=0)) + 1)
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
    direct = [_flush_group(cells, g, ours, theirs, switch_plan, received, hops - 1) for g, ours, theirs in special]
    return ReshardPlan(
        source=strategy,
        destination=home,
        policy=switch_plan.policy,
        cells=cells,
        routes=Routes.concatenate([adjoint, *direct]),
        node_of_rank=switch_plan.node_of_rank,
        card_of_rank=switch_plan.card_of_rank,
        accumulate=True,
    )


def _groups_held_repeatedly(cells: CellTable) -> np.ndarray:
    """Mask of the groups that some rank holds in more than one shard of one layout."""
    found = np.zeros(cells.num_groups, dtype=bool)
    for side in cells.sides:
        found[cells.group[side.cell[_nth(side) > 0]]] = True
    return found


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
    switch_plan: ReshardPlan,
    received: np.ndarray,
    hop: int,
) -> Routes:
    """Direct additions for a group with identical copies or with a second stage copy at home."""
    targets = theirs.select(theirs.stage_copy == 0)
    row_of_rank = {rank: row for row, rank in enumerate(targets.rank.tolist())}
    readers = _readers(ours, set(row_of_rank))
    start, stop = cells.bounds_of_group(group)
    of_group = switch_plan.routes.select(switch_plan.group_of_routes == group)
    sender = dict(zip(of_group.destination_rank.tolist(), of_group.source_rank.tolist(), strict=True))
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
