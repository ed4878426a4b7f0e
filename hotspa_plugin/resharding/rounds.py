"""What one rank does in each round of a plan: messages, their rows, and what has to be staged."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.resharding.cells import ShardTable, shard_table
from hotspa_plugin.resharding.plan import Moves, ReshardPlan, Routes

# A row of at least so many elements is a message of its own, which can go straight from or to its place;
# smaller ones are packed together, since a message costs more than copying them.
DIRECT_ELEMENTS = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where the rows of a table of moves lie on one of their two ends: arrays with one entry per row."""

    side: np.ndarray
    shard: np.ndarray
    offset: np.ndarray  # of the first element, from the local parameter's first one
    strides: np.ndarray  # [num_rows, ndim]
    contiguous: np.ndarray  # bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageRows:
    """One message: the rows whose elements it carries, one after the other."""

    peer: int
    rows: tuple[int, ...]
    num_elements: int
    staged: bool  # packed into, or unpacked from, a staging buffer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """One rank's part in one round; rows index ``moves``."""

    hop: int
    moves: Moves
    source: Places
    destination: Places
    sends: tuple[MessageRows, ...]
    receives: tuple[MessageRows, ...]
    local_rows: np.ndarray


def places(plan: ReshardPlan, moves: Moves, *, of_source: bool, mine: np.ndarray) -> Places:
    """Where rows lie on their source's or destination's end; computed for the rows in the mask ``mine``."""
    rank = moves.source_rank if of_source else moves.destination_rank
    side = moves.source_side if of_source else moves.destination_side
    shard = moves.source_shard if of_source else moves.destination_shard
    shape = moves.high - moves.low
    ndim = shape.shape[1]
    offset = np.zeros(len(moves), dtype=np.int64)
    strides = np.zeros((len(moves), ndim), dtype=np.int64)
    for which, layout in enumerate((plan.source, plan.destination)):
        table: ShardTable = shard_table(layout)
        rows = np.flatnonzero(mine & (side == which))
        at = table.row(layout.holding_of_rank[rank[rows]], shard[rows])
        strides[rows] = table.strides[at]
        offset[rows] = table.offset[at] + np.sum((moves.low[rows] - table.low[at]) * table.strides[at], axis=1)
    contiguous = np.ones(len(moves), dtype=bool)
    expected = np.ones(len(moves), dtype=np.int64)
    for dim in range(ndim - 1, -1, -1):
        contiguous &= (shape[:, dim] == 1) | (strides[:, dim] == expected)
        expected = expected * shape[:, dim]
    return Places(side=side, shard=shard, offset=offset, strides=strides, contiguous=contiguous)


def _messages(
    plan: ReshardPlan, moves: Moves, rows: np.ndarray, peer: np.ndarray, contiguous: np.ndarray, always_stage: bool
) -> tuple[MessageRows, ...]:
    """Cuts the rows shared with each peer into messages, the same way on both ends."""
    if len(rows) == 0:
        return ()
    elements = moves.num_elements[rows]
    itemsize = np.array([spec.item_size_bytes for spec in plan.source.tensors])[moves.tensor[rows]]
    order = np.lexsort((np.arange(len(rows)), -itemsize, peer[rows]))
    found = []
    rows, elements, itemsize = rows[order], elements[order], itemsize[order]
    peers = peer[rows]
    packed: list[int] = []

    def close() -> None:
        if packed:
            single = len(packed) == 1 and bool(contiguous[packed[0]])
            count = int(moves.num_elements[packed].sum())
            found.append(
                MessageRows(
                    peer=int(peer[packed[0]]),
                    rows=tuple(packed),
                    num_elements=count,
                    staged=always_stage or not single,
                )
            )
            packed.clear()

    for index, row in enumerate(rows.tolist()):
        if index and (peers[index] != peers[index - 1] or itemsize[index] != itemsize[index - 1]):
            close()
        if elements[index] >= DIRECT_ELEMENTS:
            found.append(
                MessageRows(
                    peer=int(peers[index]),
                    rows=(row,),
                    num_elements=int(elements[index]),
                    staged=always_stage or not bool(contiguous[row]),
                )
            )
        else:
            packed.append(row)
    close()
    return tuple(found)


def rounds_of_rank(
    plan: ReshardPlan, rank: int, *, memory_budget_bytes: int | None = None, stage_all: bool = False
) -> list[Round]:
    """The rounds that ``rank`` runs, in order; equally many on every rank.

    ``memory_budget_bytes`` bounds what any rank stages in a round. ``stage_all`` packs every row that is sent, for
    sources whose storage overlaps the destination's.
    Raises ValueError where the budget is smaller than the plan's smallest possible round.
    """
    found = []
    routes = plan.routes
    mine = (routes.source_rank == rank) | (routes.destination_rank == rank)
    for hop in range(plan.num_hops):
        cuts = cut_rounds(plan, hop, memory_budget_bytes)
        ours = routes.select(mine & (routes.hop == hop))
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            inside = clip(ours, int(start), int(stop))
            found.append(_round(plan, rank, hop, plan.expand(inside), stage_all))
    return found


def clip(routes: Routes, start: int, stop: int) -> Routes:
    """The parts of routes that lie in positions ``[start, stop)``."""
    clipped = dataclasses.replace(
        routes, start=np.maximum(routes.start, start), stop=np.minimum(routes.stop, stop)
    )
    return clipped.select(clipped.stop > clipped.start)


def _round(plan: ReshardPlan, rank: int, hop: int, moves: Moves, stage_all: bool) -> Round:
    is_sent = moves.source_rank == rank
    is_received = moves.destination_rank == rank
    source = places(plan, moves, of_source=True, mine=is_sent)
    destination = places(plan, moves, of_source=False, mine=is_received)
    return Round(
        hop=hop,
        moves=moves,
        source=source,
        destination=destination,
        sends=_messages(
            plan, moves, np.flatnonzero(is_sent & ~is_received), moves.destination_rank, source.contiguous, stage_all
        ),
        receives=_messages(
            plan, moves, np.flatnonzero(is_received & ~is_sent), moves.source_rank, destination.contiguous,
            plan.accumulate or stage_all,
        ),
        local_rows=np.flatnonzero(is_sent & is_received),
    )


def cut_rounds(plan: ReshardPlan, hop: int, memory_budget_bytes: int | None) -> np.ndarray:
    """Positions that cut a hop into rounds, ascending, the same on every rank: all of them depend on the plan alone.

    Every byte that a rank sends to or receives from another counts as staged, at 4 bytes an element at least in
    a flush (fp32 gradients), so that no rank can exceed the budget.
    """
    cells = plan.cells
    end = int(cells.start[-1]) if len(cells.start) else 0
    if memory_budget_bytes is None:
        return np.array([0, end], dtype=np.int64)
    routes = plan.routes
    routes = routes.select((routes.hop == hop) & (routes.source_rank != routes.destination_rank))
    if len(routes) == 0:
        return np.array([0, end], dtype=np.int64)
    weight = item_sizes(plan)[cells.group[np.searchsorted(cells.start, routes.start, side="right") - 1]]
    lines = _staged_lines(routes, weight)
    cuts = [0]
    while cuts[-1] < end:
        at = cuts[-1]
        reach = min(_reach(line, at, memory_budget_bytes) for line in lines)
        if reach >= end:
            cuts.append(end)
            break
        cell = int(np.searchsorted(cells.start, reach, side="right")) - 1
        rows = int(cells.row_elements[cell])
        stop = int(cells.start[cell]) + (int(reach) - int(cells.start[cell])) // rows * rows
        if stop <= at:
            spec = plan.source.tensors[cells.tensor[cell]]
            needed = max(_line_between(line, at, at + rows) for line in lines)
            raise ValueError(
                f"a switch memory budget of {memory_budget_bytes} bytes cannot hold one row of tensor {spec.name}: "
                f"give at least {int(needed)} bytes"
            )
        cuts.append(stop)
    return np.array(cuts, dtype=np.int64)


def item_sizes(plan: ReshardPlan) -> np.ndarray:
    """Bytes per element that a plan's staging is reckoned with, per group: in a flush at least those of fp32."""
    sizes = plan.cells.item_size_bytes
    return np.maximum(sizes, 4) if plan.accumulate else sizes


def _staged_lines(routes: Routes, weight: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per rank that moves anything: staged bytes up to each position, as a piecewise linear function (xs, ys)."""
    rank = np.concatenate([routes.source_rank, routes.source_rank, routes.destination_rank, routes.destination_rank])
    where = np.concatenate([routes.start, routes.stop, routes.start, routes.stop])
    slope = np.concatenate([weight, -weight, weight, -weight])
    order = np.lexsort((where, rank))
    rank, where, slope = rank[order], where[order], slope[order]
    firsts = np.flatnonzero(np.diff(rank, prepend=-1))
    lines = []
    for first, last in zip(firsts, [*firsts[1:], len(rank)], strict=True):
        xs, slopes = where[first:last], np.cumsum(slope[first:last])
        ys = np.concatenate([[0], np.cumsum(slopes[:-1] * np.diff(xs))])
        lines.append((xs, ys))
    return lines


def _line_at(line: tuple[np.ndarray, np.ndarray], position: int) -> float:
    return float(np.interp(position, *line))


def _line_between(line: tuple[np.ndarray, np.ndarray], start: int, stop: int) -> float:
    return _line_at(line, stop) - _line_at(line, start)


def _reach(line: tuple[np.ndarray, np.ndarray], start: int, budget: int) -> float:
    """The last position up to which at most ``budget`` bytes are staged from ``start`` on."""
    xs, ys = line
    limit = _line_at(line, start) + budget
    if limit >= ys[-1]:
        return np.inf
    index = int(np.searchsorted(ys, limit, side="right")) - 1
    rise = ys[index + 1] - ys[index]
    return float(xs[index] + (limit - ys[index]) * (xs[index + 1] - xs[index]) / rise)
