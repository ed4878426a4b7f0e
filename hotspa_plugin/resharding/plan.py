"""Reshard plans: the ordered copies (or additions) that turn one shard layout into another."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable

__all__ = ["DESTINATION", "SOURCE", "Moves", "ReshardPlan", "Routes"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """A table of copies, one row each, as equally long arrays.

    A row copies (or adds) box ``[low, high)`` of global tensor ``tensor`` from shard ``source_shard`` of
    rank ``source_rank`` to shard ``destination_shard`` of rank ``destination_rank``. ``*_side`` says in
    which of the plan's two layouts that shard index counts: a piece that a gateway rank passes on to
    its node is read from the gateway's own destination shard. ``low`` and ``high`` have shape
    ``[num_rows, max_ndim]``, padded on the right with 0 and 1.

    Rows are in canonical order: by destination rank, source rank, tensor, low.
    """

    tensor: np.ndarray
    source_rank: np.ndarray
    source_side: np.ndarray
    source_shard: np.ndarray
    destination_rank: np.ndarray
    destination_side: np.ndarray
    destination_shard: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    def select(self, rows: np.ndarray) -> Moves:
        """The rows picked by a boolean mask or an index array."""
        return Moves(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    @property
    def num_elements(self) -> np.ndarray:
        """Elements moved per row, int64 of shape ``[num_rows]``."""
        return np.prod(self.high - self.low, axis=1, dtype=np.int64)

    def sorted(self) -> Moves:
        """The rows in canonical order."""
        keys = [self.destination_shard, self.source_shard]
        keys += [self.low[:, dim] for dim in range(self.low.shape[1] - 1, -1, -1)]
        return self.select(np.lexsort((*keys, self.tensor, self.source_rank, self.destination_rank)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """A plan's moves in short: ranges of the cells' line of elements, as equally long arrays.

    A route moves positions ``[start, stop)``, which lie in one group of cells, between two ranks. ``*_nth``
    picks among several shards in which one rank holds the same cell (0 nearly always).
    """

    hop: np.ndarray
    source_rank: np.ndarray
    source_side: np.ndarray
    source_nth: np.ndarray
    destination_rank: np.ndarray
    destination_side: np.ndarray
    destination_nth: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.hop)

    def select(self, rows: np.ndarray) -> Routes:
        """The routes picked by a boolean mask or an index array."""
        return Routes(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    @classmethod
    def build(
        cls,
        *,
        source_rank: np.ndarray,
        destination_rank: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        hop: int | np.ndarray = 0,
        source_side: int | np.ndarray = SOURCE,
        destination_side: int | np.ndarray = DESTINATION,
        source_nth: int | np.ndarray = 0,
        destination_nth: int | np.ndarray = 0,
    ) -> Routes:
        """Routes from columns; single numbers are repeated. Empty ranges are left out."""
        count = len(source_rank)
        start, stop = np.asarray(start, dtype=np.int64), np.asarray(stop, dtype=np.int64)

        def column(value: int | np.ndarray, dtype: type) -> np.ndarray:
            return np.broadcast_to(np.asarray(value, dtype=dtype), (count,))

        routes = cls(
            hop=column(hop, np.int8),
            source_rank=column(source_rank, np.int32),
            source_side=column(source_side, np.int8),
            source_nth=column(source_nth, np.int8),
            destination_rank=column(destination_rank, np.int32),
            destination_side=column(destination_side, np.int8),
            destination_nth=column(destination_nth, np.int8),
            start=start,
            stop=stop,
        )
        return routes.select(stop > start)

    @classmethod
    def concatenate(cls, parts: list[Routes]) -> Routes:
        """All routes of ``parts``, in their order."""
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return cls.build(source_rank=empty, destination_rank=empty, start=empty, stop=empty)
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReshardPlan:
    """All that must happen to turn ``source`` into ``destination``.

    ``hops`` run one after the other (a later hop may read what an earlier one wrote); the rows of one
    hop are independent. ``accumulate`` is False for a parameter switch (copy) and True for a gradient
    flush (add; rows that meet in one place are added in order of their source rank).

    The plan is kept as ``routes`` over ``cells``; ``moves_of`` expands the rows of one rank, ``hops`` those of all.
    """

    source: ShardLayout
    destination: ShardLayout
    policy: str
    cells: CellTable
    routes: Routes
    node_of_rank: np.ndarray  # [num_ranks]
    card_of_rank: np.ndarray  # [num_ranks], network cards numbered over all nodes
    accumulate: bool = False

    @property
    def num_ranks(self) -> int:
        return self.source.num_ranks

    @property
    def num_hops(self) -> int:
        """Hops that the plan needs, at least 1."""
        return int(self.routes.hop.max(initial=0)) + 1

    @functools.cached_property
    def group_of_routes(self) -> np.ndarray:
        """The group of cells that each route moves."""
        if len(self.routes) == 0:
            return np.zeros(0, dtype=np.int64)
        return self.cells.group[np.searchsorted(self.cells.start, self.routes.start, side="right") - 1]

    @functools.cached_property
    def hops(self) -> tuple[Moves, ...]:
        """The rows of all ranks, per hop."""
        return self._expand_hops(self.routes)

    def moves_of(self, rank: int) -> tuple[Moves, ...]:
        """The rows that ``rank`` sends, receives or copies, per hop (as many hops on every rank)."""
        mine = (self.routes.source_rank == rank) | (self.routes.destination_rank == rank)
        return self._expand_hops(self.routes.select(mine))

    def _expand_hops(self, routes: Routes) -> tuple[Moves, ...]:
        return tuple(self.expand(routes.select(routes.hop == hop)) for hop in range(self.num_hops))

    def expand(self, routes: Routes) -> Moves:
        """The rows of some routes, in canonical order."""
        cells = self.cells
        first = np.searchsorted(cells.start, routes.start, side="right") - 1
        last = np.searchsorted(cells.start, routes.stop, side="left")
        counts = last - first
        route = np.repeat(np.arange(len(routes)), counts)
        cell = first[route] + np.arange(len(route)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.maximum(routes.start[route], cells.start[cell]) - cells.start[cell]
        end = np.minimum(routes.stop[route], cells.start[cell + 1]) - cells.start[cell]
        low, high = cells.low[cell].copy(), cells.high[cell].copy()
        whole = end - begin == cells.start[cell + 1] - cells.start[cell]
        cut = np.flatnonzero(~whole)
        dim, step = cells.row_dim[cell[cut]], cells.row_elements[cell[cut]]
        assert not np.any(begin[cut] % step) and not np.any(end[cut] % step)
        origin = low[cut, dim]
        low[cut, dim] = origin + begin[cut] // step
        high[cut, dim] = origin + end[cut] // step

        def shard(rank: np.ndarray, side: np.ndarray, nth: np.ndarray) -> np.ndarray:
            found = np.empty(len(rank), dtype=np.int32)
            for which, layout in enumerate((self.source, self.destination)):
                rows = np.flatnonzero(side == which)
                holders = cells.sides[which]
                at = holders.find(cell[rows], layout.holding_of_rank[rank[rows]].astype(np.int64))
                found[rows] = holders.shard[at + nth[rows]]
            return found

        source_rank, destination_rank = routes.source_rank[route], routes.destination_rank[route]
        source_side, destination_side = routes.source_side[route], routes.destination_side[route]
        return Moves(
            tensor=cells.tensor[cell].astype(np.int32),
            source_rank=source_rank,
            source_side=source_side,
            source_shard=shard(source_rank, source_side, routes.source_nth[route]),
            destination_rank=destination_rank,
            destination_side=destination_side,
            destination_shard=shard(destination_rank, destination_side, routes.destination_nth[route]),
            low=low,
            high=high,
        ).sorted()

    def digest(self) -> str:
        """Hex SHA-256 over the layouts, the policy and the routes, equal on all ranks that agree."""
        said = hashlib.sha256()
        for text in (self.source.digest(), self.destination.digest(), self.policy, str(self.accumulate)):
            said.update(text.encode() + b"\0")
        for field in dataclasses.fields(self.routes):
            said.update(np.ascontiguousarray(getattr(self.routes, field.name)).tobytes())
        return said.hexdigest()
