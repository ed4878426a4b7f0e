"""Reshard plans: the ordered copies (or additions) that turn one shard layout into another."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout import ShardLayout

SOURCE, DESTINATION = 0, 1  # which layout a move's end refers to


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReshardPlan:
    """All that must happen to turn ``source`` into ``destination``.

    ``hops`` run one after the other (a later hop may read what an earlier one wrote); the rows of one
    hop are independent. ``accumulate`` is False for a parameter switch (copy) and True for a gradient
    flush (add; rows that meet in one place are added in order of their source rank).
    """

    source: ShardLayout
    destination: ShardLayout
    policy: str
    hops: tuple[Moves, ...]
    accumulate: bool = False
