"""What a plan costs, and the least that any plan could cost."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.balance import solve_balance
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, cut_cells
from hotspa_plugin.resharding.flush_planner import GroupCopies, copies_of_group, read_copies
from hotspa_plugin.resharding.plan import ReshardPlan
from hotspa_plugin.resharding.planner import check_topology
from hotspa_plugin.resharding.roles import classify_nodes, gather_demands


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """Bytes that a switch moves, or the least that it can move.

    ``max_*`` are maxima over ranks, ``max_card_bytes`` over network cards of the larger of their two directions.
    As bounds, each holds given that the ones before it are met: bytes between ranks, then between nodes, then the
    largest number sent, then the largest per card.
    """

    remote_bytes: int
    cross_node_bytes: int
    max_receive_bytes: int
    max_send_bytes: float
    max_card_bytes: float


def _bytes_of_routes(plan: ReshardPlan, item_size_bytes: int | None = None) -> np.ndarray:
    sizes = np.full(plan.cells.num_groups, item_size_bytes) if item_size_bytes else plan.cells.item_size_bytes
    return (plan.routes.stop - plan.routes.start) * sizes[plan.group_of_routes]


def traffic(plan: ReshardPlan) -> np.ndarray:
    """Bytes that each rank sends to each other one, int64 of shape ``[num_ranks, num_ranks]``."""
    sent = np.zeros((plan.num_ranks, plan.num_ranks), dtype=np.int64)
    np.add.at(sent, (plan.routes.source_rank, plan.routes.destination_rank), _bytes_of_routes(plan))
    np.fill_diagonal(sent, 0)
    return sent


def plan_costs(plan: ReshardPlan, *, item_size_bytes: int | None = None) -> SwitchCosts:
    """Costs of a plan, with every element of ``item_size_bytes`` bytes (4 for fp32 gradients) or of its own size."""
    routes = plan.routes
    num_bytes = _bytes_of_routes(plan, item_size_bytes)
    remote = routes.source_rank != routes.destination_rank
    source, destination, num_bytes = routes.source_rank[remote], routes.destination_rank[remote], num_bytes[remote]
    across = plan.node_of_rank[source] != plan.node_of_rank[destination]

    def largest(keys: np.ndarray, values: np.ndarray) -> int:
        return int(np.bincount(keys, weights=values).max(initial=0)) if len(keys) else 0

    cards = plan.card_of_rank
    return SwitchCosts(
        remote_bytes=int(num_bytes.sum()),
        cross_node_bytes=int(num_bytes[across].sum()),
        max_receive_bytes=largest(destination, num_bytes),
        max_send_bytes=largest(source, num_bytes),
        max_card_bytes=max(
            largest(cards[source[across]], num_bytes[across]), largest(cards[destination[across]], num_bytes[across])
        ),
    )


def switch_bounds(
    source: ShardLayout,
    destination: ShardLayout,
    *,
    node_of_rank: np.ndarray | None = None,
    card_of_rank: np.ndarray | None = None,
) -> SwitchCosts:
    """Lower bounds of a switch, each given the goals before it; ``max_receive_bytes`` is what some rank lacks.

    Without ``node_of_rank`` there is one node: then ``max_send_bytes`` is the bound without regard to nodes.
    The bounds of the last two goals are optima of linear programs, see ``balance``.
    """
    nodes, cards = check_topology(node_of_rank, card_of_rank, source.num_ranks)
    cells = cut_cells(source, destination)
    demands = gather_demands(cells, range(cells.num_groups))
    lacked = np.zeros(source.num_ranks, dtype=np.int64)
    across = 0
    for demand in demands:
        has = np.isin(source.holding_of_rank, list(demand.sources))
        lacks = np.isin(destination.holding_of_rank, list(demand.destinations)) & ~has
        lacked[lacks] += demand.num_bytes
        across += demand.num_bytes * len(np.setdiff1d(nodes[lacks], nodes[has]))
    balance = solve_balance(demands, classify_nodes(source, destination, nodes, cards), bounds_only=True)
    return SwitchCosts(
        remote_bytes=int(lacked.sum()),
        cross_node_bytes=across,
        max_receive_bytes=int(lacked.max(initial=0)),
        max_send_bytes=balance.max_send_bytes,
        max_card_bytes=balance.max_card_bytes,
    )


def flush_costs(flush: ReshardPlan, switch: ReshardPlan) -> dict[str, int]:
    """Bytes that a flush moves between ranks (elements of the parameters' size), sharded and replicated apart.

    ``flush_sharded_bytes`` equals ``flush_sharded_bytes_bound``, what the switch moves of the same tensors.
    Replicated are tensors with several tensor-parallel copies, or a second stage copy, in one of the layouts; their
    bound connects, per data-parallel replica of home, every copy that is read with every copy that receives:
    one message fewer than there are such ranks.
    """
    strategy, home = flush.source, flush.destination
    found = dict.fromkeys(("sharded", "sharded_bound", "replicated", "replicated_bound"), 0)
    sizes = flush.cells.item_size_bytes

    def remote_bytes(plan: ReshardPlan) -> np.ndarray:
        routes = plan.routes
        elements = (routes.stop - routes.start) * (routes.source_rank != routes.destination_rank)
        return np.bincount(plan.group_of_routes, weights=elements, minlength=len(sizes)).astype(np.int64) * sizes

    flushed, switched = remote_bytes(flush), remote_bytes(switch)
    for group in np.flatnonzero(flush.cells.trainable).tolist():
        ours = copies_of_group(flush.cells, SOURCE, group, strategy)
        theirs = copies_of_group(flush.cells, DESTINATION, group, home)
        copied = any(len(np.unique(c.tp_copy)) > 1 for c in (ours, theirs)) or theirs.stage_copy.any()
        kind = "replicated" if copied else "sharded"
        found[kind] += int(flushed[group])
        if not copied:
            found["sharded_bound"] += int(switched[group])
            continue
        start, stop = flush.cells.bounds_of_group(group)
        found["replicated_bound"] += (stop - start) * int(sizes[group]) * _fewest_messages(ours, theirs)
    return {
        f"flush_{name.replace('_bound', '')}_bytes" + ("_bound" if "_bound" in name else ""): value
        for name, value in found.items()
    }


def _fewest_messages(ours: GroupCopies, theirs: GroupCopies) -> int:
    """A lower bound on the messages that bring one element of a replicated tensor home."""
    targets = theirs.select(theirs.stage_copy == 0)
    at_home = set(targets.rank.tolist())
    readers = read_copies(ours, at_home)
    if not targets.is_identical:
        return sum(rank not in at_home for rank in readers.rank.tolist())
    num_copies = len(np.unique(targets.tp_copy))
    inside = [len(np.intersect1d(readers.rank, targets.rank[targets.dp_rank == d])) for d in np.unique(targets.dp_rank)]
    best = max(inside)
    # A replica of home whose own ranks read more than it costs to join it to another replica stays apart.
    apart = sum(min(0, num_copies - 1 - count) for count in sorted(inside)[:-1])
    return len(readers.rank) - best + num_copies - 1 + apart
