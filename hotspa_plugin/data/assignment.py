"""Which replica trains which sequence of a global batch, in which micro-batch.

Every rank computes the same assignment from the lengths alone. Pure: no torch, no communication.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hotspa_plugin.cost.micro_batch import MicroBatchCost, pipeline_s, shared_cores_s
from hotspa_plugin.data.balancing import balance_packed, balance_padded

Packing = Literal["packed", "padded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """What the assignment must know of one bucket and the strategy that runs it.

    The bucket takes sequences of up to ``bound_tokens`` (and over the previous bucket's bound). A micro-batch holds
    up to ``micro_batch_tokens`` tokens (default: the bound), after which it is padded to a multiple of
    ``length_multiple`` (what sequence or context parallelism divides).
    """

    bound_tokens: int
    num_replicas: int  # data-parallel size
    num_stages: int = 1  # pipeline-parallel size
    length_multiple: int = 1
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("bound_tokens", "num_replicas", "num_stages", "length_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"bucket up to {self.bound_tokens}: {name} {getattr(self, name)} must be at least 1")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < self.bound_tokens:
            raise ValueError(
                f"bucket up to {self.bound_tokens}: micro-batches of {self.micro_batch_tokens} tokens cannot hold its "
                f"longest sequence: use at least {self.bound_tokens}"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a micro-batch may hold, before it is padded to the multiple."""
        return self.micro_batch_tokens if self.micro_batch_tokens is not None else self.bound_tokens

    def padded(self, num_tokens: int) -> int:
        """``num_tokens`` rounded up to the multiple."""
        return -(-num_tokens // self.length_multiple) * self.length_multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssignedMicroBatch:
    """One micro-batch: ``samples`` are ascending positions in the global batch.

    ``num_padded_tokens`` counts the slots of the tensors (the packed row, or rows times the longest), of which
    ``num_tokens`` hold tokens of sequences.
    """

    samples: tuple[int, ...]
    num_tokens: int
    num_padded_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketAssignment:
    """One bucket's work: ``replicas[dp_rank]`` are that replica's micro-batches, none for some replicas perhaps."""

    bucket: int  # index into the bucket specs
    replicas: tuple[tuple[AssignedMicroBatch, ...], ...]
    replica_costs_s: tuple[float, ...]  # by the cost model, pipeline filling included
    mean_work_s: float = 0.0  # of a replica by the cost model, without pipeline filling

    def seconds(self, ranks_per_core: float = 1.0) -> float:
        """What the bucket takes by the cost model."""
        return shared_cores_s(max(self.replica_costs_s), self.mean_work_s, ranks_per_core)

    @property
    def micro_batches(self) -> tuple[AssignedMicroBatch, ...]:
        return tuple(micro_batch for replica in self.replicas for micro_batch in replica)

    @property
    def num_sequences(self) -> int:
        return sum(len(micro_batch.samples) for micro_batch in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        return sum(micro_batch.num_tokens for micro_batch in self.micro_batches)

    @property
    def num_padding_tokens(self) -> int:
        return sum(micro_batch.num_padded_tokens for micro_batch in self.micro_batches) - self.num_tokens

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchAssignment:
    """A global batch laid out over the non-empty buckets, in ascending order of their bounds."""

    packing: Packing
    buckets: tuple[BucketAssignment, ...]

    def positions(self, dp_ranks: Sequence[int]) -> list[int]:
        """Positions in the batch of all that a rank trains whose replica under strategy i is ``dp_ranks[i]``."""
        return [
            position
            for bucket in self.buckets
            for micro_batch in bucket.replicas[dp_ranks[bucket.bucket]]
            for position in micro_batch.samples
        ]

    @property
    def num_sequences(self) -> int:
        return sum(bucket.num_sequences for bucket in self.buckets)

    @property
    def num_tokens(self) -> int:
        return sum(bucket.num_tokens for bucket in self.buckets)

    @property
    def num_padding_tokens(self) -> int:
        return sum(bucket.num_padding_tokens for bucket in self.buckets)

    def digest(self) -> str:
        """Hex SHA-256 over who trains what, equal on all ranks that agree."""
        said = [
            self.packing,
            [
                [b.bucket, [[[m.samples, m.num_padded_tokens] for m in replica] for replica in b.replicas]]
                for b in self.buckets
            ],
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def bucket_of_lengths(lengths: np.ndarray | Sequence[int], bounds_tokens: Sequence[int]) -> np.ndarray:
    """The bucket of each length: the first whose bound is not below it; ``len(bounds_tokens)`` where none is."""
    return np.searchsorted(np.asarray(bounds_tokens, dtype=np.int64), np.asarray(lengths, dtype=np.int64), side="left")


def assign_batch(
    lengths: np.ndarray | Sequence[int],
    *,
    buckets: Sequence[BucketSpec],
    packing: Packing = "packed",
    cost: MicroBatchCost | Sequence[MicroBatchCost] = MicroBatchCost(),
) -> BatchAssignment:
    """Lays a global batch out over buckets, replicas and micro-batches.

    Args:
        lengths: tokens of each sequence of the batch, shape ``[num_sequences]``.
        buckets: ascending by bound.
        packing: ``packed`` puts several sequences into one row, ``padded`` gives each its own row.
        cost: of a micro-batch on one pipeline stage; one for all buckets or one each. The largest replica's
            ``pipeline_s`` is what is kept small in each bucket.

    Every sequence appears exactly once. Replicas may be left without work; buckets without sequences are absent.

    Raises:
        ValueError: a sequence is empty or longer than the last bound, or bounds do not ascend.
    """
    if packing not in ("packed", "padded"):
        raise ValueError(f"packing {packing!r}: choose packed or padded")
    bounds = [bucket.bound_tokens for bucket in buckets]
    if not bounds or any(low >= high for low, high in itertools.pairwise(bounds)):
        raise ValueError(f"bucket bounds {bounds}: give at least one, in ascending order")
    costs = [cost] * len(buckets) if isinstance(cost, MicroBatchCost) else list(cost)
    if len(costs) != len(buckets):
        raise ValueError(f"{len(costs)} costs for {len(buckets)} buckets: give one cost, or one for each bucket")
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"sample {int(lengths.argmin())}: has no tokens: leave empty sequences out")
    bucket_of_sample = bucket_of_lengths(lengths, bounds)
    if len(lengths) and bucket_of_sample.max() == len(buckets):
        sample = int(np.argmax(bucket_of_sample))
        raise ValueError(
            f"sample {sample}: {lengths[sample]} tokens are over the last bound, {bounds[-1]}: "
            "raise the bound, or truncate, split or drop long sequences"
        )
    assigned = []
    for index, (spec, bucket_cost) in enumerate(zip(buckets, costs, strict=True)):
        positions = np.flatnonzero(bucket_of_sample == index)
        if len(positions):
            assigned.append(assign_bucket(index, spec, positions, lengths[positions], packing, bucket_cost))
    return BatchAssignment(packing=packing, buckets=tuple(assigned))


def assign_bucket(
    index: int, spec: BucketSpec, positions: np.ndarray, lengths: np.ndarray, packing: Packing, cost: MicroBatchCost
) -> BucketAssignment:
    """Balances one bucket: the sequences at ``positions`` of the batch, of these ``lengths`` (tokens, at most what its
    micro-batches hold), over the replicas of ``spec``. ``index`` is the bucket's place among the specs."""
    shape = dict(
        num_replicas=spec.num_replicas, num_stages=spec.num_stages, capacity_tokens=spec.capacity_tokens, cost=cost
    )
    if packing == "packed":
        replicas = balance_packed(lengths, **shape)
    else:
        # the padded length is what a row costs and holds; a lone sequence always fits its bucket
        rows = np.array([spec.padded(length) for length in lengths.tolist()], dtype=np.int64)
        shape["capacity_tokens"] = spec.padded(spec.capacity_tokens)
        replicas = balance_padded(rows, **shape)

    built, replica_costs_s, work_s = [], [], 0.0
    for replica in replicas:
        micro_batches = []
        micro_batch_costs_s = []
        for members in replica:
            members = sorted(members)
            num_tokens = int(lengths[members].sum())
            if packing == "packed":
                num_padded_tokens = spec.padded(num_tokens)
                micro_batch_costs_s.append(cost.packed_s(lengths[members]))
            else:
                num_padded_tokens = len(members) * int(rows[members].max())
                micro_batch_costs_s.append(cost.padded_s(len(members), int(rows[members].max())))
            micro_batches.append(
                AssignedMicroBatch(
                    samples=tuple(positions[members].tolist()),
                    num_tokens=num_tokens,
                    num_padded_tokens=num_padded_tokens,
                )
            )
        # the largest first, then by position: a fixed order, and the pipeline drains on small ones
        built.append(tuple(sorted(micro_batches, key=lambda m: (-m.num_padded_tokens, m.samples))))
        replica_costs_s.append(pipeline_s(micro_batch_costs_s, spec.num_stages))
        work_s += sum(micro_batch_costs_s)
    return BucketAssignment(
        bucket=index,
        replicas=tuple(built),
        replica_costs_s=tuple(replica_costs_s),
        mean_work_s=work_s / spec.num_replicas,
    )
