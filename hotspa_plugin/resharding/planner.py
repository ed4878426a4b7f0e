"""Planning switches: which rank sends which piece of the parameters to whom."""

from __future__ import annotations

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, CellTable, Incidences, cut_cells
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
        source=source,
        destination=destination,
        policy=policy,
        cells=cells,
        routes=routes,
        node_of_rank=nodes,
        card_of_rank=cards,
    )


def occurrence(holders: Incidences) -> np.ndarray:
    """How many shards of the same holding that cover the same cell come before each incidence."""
    if len(holders.key) == 0:
        return np.zeros(0, dtype=np.int64)
    return np.arange(len(holders.key)) - np.searchsorted(holders.key, holders.key)


def _repeated_holdings(cells: CellTable, destination: ShardLayout, *, hop: int) -> list[Routes]:
    """Local copies for ranks that hold a cell in more than one shard: the first is filled, then the others from it."""
    holders = cells.sides[DESTINATION]
    found = []
    for index in np.flatnonzero(occurrence(holders)):
        ranks = np.flatnonzero(destination.holding_of_rank == holders.holding[index])
        cell = holders.cell[index]
        found.append(
            Routes.build(
                hop=hop,
                source_rank=ranks,
                source_side=DESTINATION,
                destination_rank=ranks,
                destination_nth=int(occurrence(holders)[index]),
                start=np.full(len(ranks), cells.start[cell]),
                stop=np.full(len(ranks), cells.start[cell + 1]),
            )
        )
    return found
