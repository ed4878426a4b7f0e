"""What every rank holds of every global tensor: regions, shards and shard layouts."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

ITEM_SIZE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


class GradientClass(enum.Enum):
    """What the tensor-parallel copies of one parameter hold after a backward pass.

    ``PARTIAL`` copies hold different sums that must be added; ``IDENTICAL`` copies hold the same
    gradient, of which one is read. Copies along data parallel, and the two holders of a tied
    embedding, are always partial.
    """

    PARTIAL = "partial"
    IDENTICAL = "identical"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One global tensor, independent of any parallel strategy.

    ``shape`` counts elements; a leading layer axis, where there is one, belongs to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE_BYTES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} is not one of {sorted(ITEM_SIZE_BYTES)}")

    @property
    def item_size_bytes(self) -> int:
        return ITEM_SIZE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A half-open box ``[low, high)`` of a global tensor, one pair of bounds per dim."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(h - l for l, h in zip(self.low, self.high, strict=True))

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A region that a rank holds, and where it lies in a local parameter.

    Element ``region.low + i`` of the global tensor is element
    ``storage_offset + sum(i[d] * strides[d])`` of the local ``parameter``'s own storage span,
    counted in elements from the parameter's first one. ``strides`` has one entry per dim of the
    global tensor (0 along dims of extent 1 that the local parameter lacks, such as the layer axis).
    """

    tensor: int  # index into ShardLayout.tensors
    region: Region
    parameter: str  # name of the local parameter
    storage_offset: int
    strides: tuple[int, ...]
    stage_copy: int = 0  # 1 for the second holder of a tied embedding
    tp_copy: int = 0  # index along tensor parallel where the region is replicated there, else 0
    gradient_class: GradientClass = GradientClass.PARTIAL


Holding = tuple[Shard, ...]  # all shards of one rank


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardLayout:
    """What each of ``num_ranks`` ranks holds under one strategy.

    Ranks that hold the same (data-parallel copies) share one holding: ``holding_of_rank[r]``
    indexes ``holdings``. ``dp_rank[r]`` is the data-parallel rank of rank r; both are int arrays of
    shape ``[num_ranks]``.
    """

    label: str  # the strategy, as written in a pool
    tensors: tuple[TensorSpec, ...]
    holdings: tuple[Holding, ...]
    holding_of_rank: np.ndarray
    dp_rank: np.ndarray

    @property
    def num_ranks(self) -> int:
        return len(self.holding_of_rank)

    def shards(self, rank: int) -> Holding:
        return self.holdings[self.holding_of_rank[rank]]

    @classmethod
    def from_ranks(
        cls,
        *,
        label: str,
        tensors: Sequence[TensorSpec],
        shards_of_rank: Iterable[Holding],
        dp_rank: Sequence[int],
    ) -> ShardLayout:
        """Builds a layout from every rank's own shards, merging equal holdings."""
        index: dict[Holding, int] = {}
        holding_of_rank = [index.setdefault(tuple(shards), len(index)) for shards in shards_of_rank]
        if len(holding_of_rank) != len(dp_rank):
            raise ValueError(f"layout {label}: {len(holding_of_rank)} ranks but {len(dp_rank)} data-parallel ranks")
        return cls(
            label=label,
            tensors=tuple(tensors),
            holdings=tuple(index),
            holding_of_rank=np.asarray(holding_of_rank, dtype=np.int32),
            dp_rank=np.asarray(dp_rank, dtype=np.int32),
        )

    def digest(self) -> str:
        """Hex SHA-256 over all that the layout says, equal on all ranks that agree."""
        said = [
            self.label,
            [dataclasses.astuple(spec) for spec in self.tensors],
            [
                [
                    (
                        s.tensor,
                        s.region.low,
                        s.region.high,
                        s.parameter,
                        s.storage_offset,
                        s.strides,
                        s.stage_copy,
                        s.tp_copy,
                        s.gradient_class.value,
                    )
                    for s in holding
                ]
                for holding in self.holdings
            ],
            self.holding_of_rank.tolist(),
            self.dp_rank.tolist(),
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()
