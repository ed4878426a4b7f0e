"""What one rank does in each round of a plan: messages, their rows, and what has to be staged."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.resharding.cells import ShardTable, shard_table
from hotspa_plugin.resharding.plan import Moves, ReshardPlan, Routes
from hotspa_plugin.resharding.round_cuts import DIRECT_ELEMENTS, cut_rounds

__all__ = ["DIRECT_ELEMENTS", "MessageRows", "Places", "Round", "StagingLayout", "rounds_of_rank", "staging_layout"]


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
) -> list[MessageRows]:
    """Cuts the rows shared with each peer into messages, the same way on both ends."""
    if len(rows) == 0:
        return []
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
    return found


def _in_turn(messages: list[MessageRows], rank: int, num_ranks: int, *, step: int) -> tuple[MessageRows, ...]:
    """Messages such that no rank is everybody's first: each pair's keep their order, peers take turns.

    With ``step`` 1 ranks send to their successor first, with -1 they receive from their predecessor first.
    """
    count: dict[int, int] = {}
    keys = []
    for message in messages:
        nth = count.get(message.peer, 0)
        count[message.peer] = nth + 1
        keys.append((nth, step * (message.peer - rank) % num_ranks))
    return tuple(messages[i] for i in sorted(range(len(messages)), key=keys.__getitem__))


def rounds_of_rank(
    plan: ReshardPlan,
    rank: int,
    *,
    memory_budget_bytes: int | None = None,
    stage_all: bool = False,
    converted: bool = False,
) -> list[Round]:
    """The rounds that ``rank`` runs, in order; equally many on every rank.

    ``memory_budget_bytes`` bounds what any rank stages in a round. ``stage_all`` packs every row that is sent, for
    sources whose storage overlaps the destination's. ``converted``, the same on every rank, says that all messages are
    staged because they travel in another dtype.
    Raises ValueError where the budget is smaller than the plan's smallest possible round.
    """
    found = []
    routes = plan.routes
    mine = (routes.source_rank == rank) | (routes.destination_rank == rank)
    for hop in range(plan.num_hops):
        cuts = cut_rounds(plan, hop, memory_budget_bytes, stage_all=converted)
        ours = routes.select(mine & (routes.hop == hop))
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            inside = clip(ours, int(start), int(stop))
            found.append(_round(plan, rank, hop, plan.expand(inside), stage_all))
    return found


def clip(routes: Routes, start: int, stop: int) -> Routes:
    """The parts of routes that lie in positions ``[start, stop)``."""
    clipped = dataclasses.replace(routes, start=np.maximum(routes.start, start), stop=np.minimum(routes.stop, stop))
    return clipped.select(clipped.stop > clipped.start)


def _round(plan: ReshardPlan, rank: int, hop: int, moves: Moves, stage_all: bool) -> Round:
    is_sent = moves.source_rank == rank
    is_received = moves.destination_rank == rank
    source = places(plan, moves, of_source=True, mine=is_sent)
    destination = places(plan, moves, of_source=False, mine=is_received)
    sends = _messages(
        plan, moves, np.flatnonzero(is_sent & ~is_received), moves.destination_rank, source.contiguous, stage_all
    )
    receives = _messages(
        plan,
        moves,
        np.flatnonzero(is_received & ~is_sent),
        moves.source_rank,
        destination.contiguous,
        plan.accumulate or stage_all,
    )
    return Round(
        hop=hop,
        moves=moves,
        source=source,
        destination=destination,
        sends=_in_turn(sends, rank, plan.num_ranks, step=1),
        receives=_in_turn(receives, rank, plan.num_ranks, step=-1),
        local_rows=np.flatnonzero(is_sent & is_received),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagingLayout:
    """Byte offsets, in the staging buffer, of all that one rank stages in one round."""

    sends: dict[tuple, int]  # by what a message carries: equal messages are packed once
    receives: dict[int, int]  # by index in ``Round.receives``
    local_rows: dict[int, int]
    num_bytes: int


def carried(round_: Round, message: MessageRows) -> tuple:
    """What a message carries; messages for which this is equal carry the same elements."""
    moves, source = round_.moves, round_.source
    return tuple(
        (int(source.side[r]), int(source.shard[r]), *moves.low[r].tolist(), *moves.high[r].tolist())
        for r in message.rows
    )


def staging_layout(
    round_: Round, item_size_of_tensor: np.ndarray, *, local_item_size: np.ndarray | None = None
) -> StagingLayout:
    """Places all staged messages of a round one after the other, wider elements first: aligned and without gaps.

    ``item_size_of_tensor`` gives bytes per element of messages, by the plan's source tensors, and
    ``local_item_size`` those of local rows, where these must be staged too.
    """
    wanted: list[tuple[int, int, dict, object]] = []
    sends: dict[tuple, int] = {}
    receives: dict[int, int] = {}
    local: dict[int, int] = {}

    def add(table: dict, key: object, row: int, count: int, sizes: np.ndarray = item_size_of_tensor) -> None:
        size = int(sizes[round_.moves.tensor[row]])
        table[key] = -1
        wanted.append((size, size * count, table, key))

    for message in round_.sends:
        if message.staged and (key := carried(round_, message)) not in sends:
            add(sends, key, message.rows[0], message.num_elements)
    for index, message in enumerate(round_.receives):
        if message.staged:
            add(receives, index, message.rows[0], message.num_elements)
    if local_item_size is not None:
        elements = round_.moves.num_elements
        for row in round_.local_rows.tolist():
            add(local, row, row, int(elements[row]), local_item_size)
    total = 0
    for _, num_bytes, table, key in sorted(wanted, key=lambda item: -item[0]):
        table[key] = total
        total += num_bytes
    return StagingLayout(sends=sends, receives=receives, local_rows=local, num_bytes=total)


def predict_peak_extra_bytes(
    plan: ReshardPlan, rank: int, *, memory_budget_bytes: int | None = None, item_size_bytes: int | None = None
) -> int:
    """Staging memory that ``rank`` needs in its largest round, with elements of their own or of a given size."""
    sizes = np.array([item_size_bytes or spec.item_size_bytes for spec in plan.source.tensors])
    rounds = rounds_of_rank(plan, rank, memory_budget_bytes=memory_budget_bytes)
    return max((staging_layout(one, sizes).num_bytes for one in rounds), default=0)
