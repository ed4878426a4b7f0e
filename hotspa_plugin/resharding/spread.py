"""From flows between roles to routes between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.balance import Balance, NodeFlow, solve_balance
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable
from hotspa_plugin.resharding.plan import Routes
from hotspa_plugin.resharding.roles import Demand, NodeClass, classify_nodes, gather_demands

NEGLIGIBLE = 1e-9  # a fraction that the solver's rounding may leave behind
HALF_BYTE = 0.5  # cuts closer than this are one


def balanced_routes(
    cells: CellTable,
    source: ShardLayout,
    destination: ShardLayout,
    node_of_rank: np.ndarray,
    card_of_rank: np.ndarray,
    groups: Sequence[int] | None = None,
    source_allowed: np.ndarray | None = None,
) -> Routes:
    """Routes for some groups of cells (default: all) under the policy ``balanced``; see ``balance`` for its goals.

    ``source_allowed``, a mask over the source side's incidences, leaves out copies that must not send.
    """
    demands = gather_demands(cells, range(cells.num_groups) if groups is None else groups, source_allowed)
    classes = classify_nodes(source, destination, node_of_rank, card_of_rank)
    balance = solve_balance(demands, classes)
    parts = [_local(demand, source, destination) for demand in demands]
    entries: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for flow in balance.flows:
        _inside(flow, demands[flow.demand], classes[flow.node_class], cells, parts, entries)
    for number, arrivals in entries.items():
        parts.append(_across(demands[number], balance, number, classes, cells, arrivals))
    return Routes.concatenate(parts)


def _member_mask(holdings: frozenset[int], count: int) -> np.ndarray:
    mask = np.zeros(count, dtype=bool)
    mask[list(holdings)] = True
    return mask


def _local(demand: Demand, source: ShardLayout, destination: ShardLayout) -> Routes:
    has = _member_mask(demand.sources, len(source.holdings))[source.holding_of_rank]
    wants = _member_mask(demand.destinations, len(destination.holdings))[destination.holding_of_rank]
    ranks = np.flatnonzero(has & wants)
    return _routes(demand, ranks, ranks, np.zeros(len(ranks)), np.full(len(ranks), demand.num_bytes))


def _routes(
    demand: Demand,
    source_rank: np.ndarray,
    destination_rank: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    *,
    hop: int = 0,
    source_side: int = SOURCE,
) -> Routes:
    """Routes from ranges on a demand's line of bytes, cut where one group of cells ends."""
    parts = []
    for span in range(len(demand.groups)):
        first, last = demand.span_start[span], demand.span_start[span + 1]
        low, high = np.maximum(start, first), np.minimum(stop, last)
        rows = np.flatnonzero(low < high)
        size = demand.item_size_bytes[span]
        parts.append(
            Routes.build(
                hop=hop,
                source_rank=source_rank[rows],
                source_side=source_side,
                destination_rank=destination_rank[rows],
                start=demand.position[span] + (low[rows] - first).astype(np.int64) // size,
                stop=demand.position[span] + (high[rows] - first).astype(np.int64) // size,
            )
        )
    return Routes.concatenate(parts)


def _match(demanded: np.ndarray, quotas: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Deals demands, one after the other, to suppliers in proportion to their quotas.

    Returns, per piece: index of the demand, index of the supplier, and the piece's bounds within the demand.
    """
    ends = np.cumsum(demanded)
    supplied = np.cumsum(quotas)
    supplied = supplied * (ends[-1] / supplied[-1])
    supplied[-1] = ends[-1]
    cuts = np.unique(np.concatenate([[0.0], ends, supplied]))
    cuts = cuts[np.concatenate([[True], np.diff(cuts) > HALF_BYTE])]
    middle = (cuts[:-1] + cuts[1:]) / 2
    demand = np.searchsorted(ends, middle, side="right")
    supplier = np.searchsorted(supplied, middle, side="right")
    begins = ends[demand] - demanded[demand]
    return demand, supplier, cuts[:-1] - begins, cuts[1:] - begins


def _per_column(nodes: NodeClass, amounts: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the roles with a positive amount, and what each of them gets."""
    kept = {role: amount for role, amount in amounts.items() if amount > NEGLIGIBLE}
    columns = [nodes.columns_of_role[role] for role in kept]
    shares = [np.full(len(c), kept[role] / len(c)) for role, c in zip(kept, columns, strict=True)]
    if not columns:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    return np.concatenate(columns), np.concatenate(shares)


def _inside(
    flow: NodeFlow,
    demand: Demand,
    nodes: NodeClass,
    cells: CellTable,
    parts: list[Routes],
    entries: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]],
) -> None:
    """Adds the routes inside the nodes of one class, and notes what enters them from elsewhere.

    What is worked out for the columns of one node holds for all nodes of the class.
    """
    lacking = np.concatenate([nodes.columns_of_role[role] for role in flow.lacking_roles])
    gates, shares = _per_column(nodes, flow.enters)
    total = float(demand.num_bytes)
    if flow.sends:
        edges = demand.snap(np.concatenate([[0.0], np.cumsum(shares)]) * total, cells)
    else:
        edges = demand.snap(np.concatenate([[0.0], np.cumsum(shares)]) * (total / shares.sum()), cells)
        edges[-1] = demand.num_bytes
    gate_start, gate_stop = edges[:-1], edges[1:]

    # Gateways pass their part on to the other lacking ranks of the node.
    if len(gates) and len(lacking) > 1:
        gate = np.repeat(np.arange(len(gates)), len(lacking))
        taker = np.tile(lacking, len(gates))
        other = gates[gate] != taker
        gate, taker = gate[other], taker[other]
        parts.append(
            _on_all_nodes(
                demand, nodes, gates[gate], taker, gate_start[gate], gate_stop[gate], hop=1, source_side=DESTINATION
            )
        )
    if not flow.sends:
        ranks = nodes.ranks[:, gates]
        entries.setdefault(flow.demand, []).append(
            (ranks.reshape(-1), np.tile(gate_start, len(ranks)), np.tile(gate_stop, len(ranks)))
        )
        return
    takers = np.concatenate([gates, lacking])
    starts = np.concatenate([gate_start, np.full(len(lacking), edges[-1])])
    stops = np.concatenate([gate_stop, np.full(len(lacking), demand.num_bytes)])
    rows = np.flatnonzero(stops > starts)
    takers, starts, stops = takers[rows], starts[rows], stops[rows]
    holders, quotas = _per_column(nodes, flow.sends)
    piece, supplier, begin, end = _match((stops - starts).astype(np.float64), quotas)
    begin, end = _snap_pieces(demand, cells, starts[piece], stops[piece], begin, end)
    parts.append(_on_all_nodes(demand, nodes, holders[supplier], takers[piece], begin, end))


def _snap_pieces(
    demand: Demand, cells: CellTable, starts: np.ndarray, stops: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds on the demand's line of pieces ``[begin, end)`` of ``[starts, stops)``, where cells may be cut."""
    low = np.clip(demand.snap(starts + begin, cells), starts, stops)
    high = np.clip(demand.snap(starts + end, cells), starts, stops)
    # Rounding must not tear an edge off: the first piece of a range begins with it, the last ends with it.
    low = np.where(begin <= HALF_BYTE, starts, low)
    high = np.where(end >= (stops - starts) - HALF_BYTE, stops, high)
    return low, high


def _on_all_nodes(
    demand: Demand,
    nodes: NodeClass,
    source_column: np.ndarray,
    destination_column: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    *,
    hop: int = 0,
    source_side: int = SOURCE,
) -> Routes:
    return _routes(
        demand,
        nodes.ranks[:, source_column].reshape(-1),
        nodes.ranks[:, destination_column].reshape(-1),
        np.tile(start, nodes.num_nodes),
        np.tile(stop, nodes.num_nodes),
        hop=hop,
        source_side=source_side,
    )


def _across(
    demand: Demand,
    balance: Balance,
    number: int,
    classes: Sequence[NodeClass],
    cells: CellTable,
    arrivals: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> Routes:
    """Routes from holders to the gateways of other nodes."""
    gates, starts, stops = (np.concatenate(column) for column in zip(*arrivals, strict=True))
    rows = np.flatnonzero(stops > starts)
    gates, starts, stops = gates[rows], starts[rows], stops[rows]
    ranks, quotas = [], []
    for (at, role), copies in balance.across[number].items():
        if copies > NEGLIGIBLE:
            holders = classes[at].ranks[:, classes[at].columns_of_role[role]].reshape(-1)
            ranks.append(holders)
            quotas.append(np.full(len(holders), copies / len(holders)))
    holders = np.concatenate(ranks)
    piece, supplier, begin, end = _match((stops - starts).astype(np.float64), np.concatenate(quotas))
    begin, end = _snap_pieces(demand, cells, starts[piece], stops[piece], begin, end)
    return _routes(demand, holders[supplier], gates[piece], begin, end)
