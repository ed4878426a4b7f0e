"""Where each rank stands under a strategy, and which ranks form its groups."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from hotspa_plugin.strategy import ParallelStrategy

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A rank's index along each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankGrid:
    """All ranks laid out along the axes of ``strategy``, the first axis of ``order`` changing fastest.

    This is the numbering of Megatron-core's parallel_state, for its dense layers: ep is an axis of
    size 1 there, since expert groups divide the dp ranks anew. An unresolved strategy is resolved.
    """

    strategy: ParallelStrategy
    world_size: int
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", self.strategy.resolve(self.world_size))
        axes = self.order.split("-")
        if sorted(axes) not in (sorted(AXES), sorted(set(AXES) - {"ep"})):
            raise ValueError(
                f"rank order {self.order!r} must name each of {', '.join(AXES)} once; default {DEFAULT_ORDER}"
            )

    @functools.cached_property
    def _axes(self) -> tuple[str, ...]:
        """The axes in order, without ep."""
        return tuple(axis for axis in self.order.split("-") if axis != "ep")

    @functools.cached_property
    def _ranks(self) -> np.ndarray:
        """Rank numbers as an array whose *last* dim is the first axis of the order."""
        sizes = [getattr(self.strategy, axis) for axis in reversed(self._axes)]
        return np.arange(self.world_size).reshape(sizes)

    def _index(self, axis: str) -> np.ndarray:
        dim = len(self._axes) - 1 - self._axes.index(axis)
        index = np.unravel_index(np.arange(self.world_size), self._ranks.shape)[dim].astype(np.int32)
        index.flags.writeable = False
        return index

    @functools.cached_property
    def tp_rank(self) -> np.ndarray:
        """Tensor-parallel index of every rank, int32 of shape ``[world_size]``."""
        return self._index("tp")

    @functools.cached_property
    def cp_rank(self) -> np.ndarray:
        """Context-parallel index of every rank, int32 of shape ``[world_size]``."""
        return self._index("cp")

    @functools.cached_property
    def dp_rank(self) -> np.ndarray:
        """Data-parallel index of every rank, int32 of shape ``[world_size]``."""
        return self._index("dp")

    @functools.cached_property
    def pp_rank(self) -> np.ndarray:
        """Pipeline stage of every rank, int32 of shape ``[world_size]``."""
        return self._index("pp")

    def coordinate(self, rank: int) -> Coordinate:
        """Where ``rank`` stands."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside the world of {self.world_size} ranks (0 to {self.world_size - 1})"
            )
        return Coordinate(
            tp=int(self.tp_rank[rank]),
            cp=int(self.cp_rank[rank]),
            dp=int(self.dp_rank[rank]),
            pp=int(self.pp_rank[rank]),
        )

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank that stands at the given indices."""
        at = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        for axis, index in at.items():
            if not 0 <= index < getattr(self.strategy, axis):
                raise ValueError(
                    f"strategy {self.strategy}: {axis} index {index} is outside 0 to {getattr(self.strategy, axis) - 1}"
                )
        return int(self._ranks[tuple(at[axis] for axis in reversed(self._axes))])

    def groups(self, axes: str) -> list[tuple[int, ...]]:
        """The groups along one axis or several, such as ``"tp"`` or ``"tp-pp"``, as tuples of ranks.

        Each group holds the ranks that differ in these axes only. Groups and their ranks come in
        Megatron-core's order: along each, the leftmost axis of the rank order changes fastest,
        whatever order ``axes`` names them in.
        """
        inside = set(axes.split("-"))
        if unknown := sorted(inside - set(AXES)):
            raise ValueError(f"groups {axes!r}: {unknown[0]!r} is not one of {', '.join(AXES)}")
        dims = list(enumerate(reversed(self._axes)))
        outer = [dim for dim, axis in dims if axis not in inside]
        inner = [dim for dim, axis in dims if axis in inside]
        size = int(np.prod([self._ranks.shape[dim] for dim in inner], dtype=np.int64))
        table = self._ranks.transpose(outer + inner).reshape(-1, size)
        return [tuple(row) for row in table.tolist()]

    def embedding_groups(self) -> list[tuple[int, ...]]:
        """For each pipeline, the ranks that hold the word embedding: its first and last stage."""
        return [tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in self.groups("pp")]

    def position_embedding_groups(self) -> list[tuple[int, ...]]:
        """For each pipeline, the rank that holds learned positions: its first stage."""
        return [ranks[:1] for ranks in self.groups("pp")]

    def group_of(self, axes: str, rank: int) -> tuple[int, ...]:
        """The group along ``axes`` that holds ``rank``."""
        at = dataclasses.asdict(self.coordinate(rank))
        inside = set(axes.split("-"))
        # The first axis of the order changes fastest inside a group, hence the reversal.
        spans = [range(getattr(self.strategy, a)) if a in inside else (at[a],) for a in reversed(self._axes)]
        return tuple(int(self._ranks[index]) for index in itertools.product(*spans))
