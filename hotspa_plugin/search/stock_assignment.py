"""How a training script without length buckets lays a batch out, as the baseline to compare with.

Rows are of one length, the context; they are dealt to data-parallel replicas in the order in which they come, one row
to a micro-batch, as Megatron's samplers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.data import AssignedMicroBatch, BatchAssignment, BucketAssignment
from hotspa_plugin.data.assignment import Packing


@dataclasses.dataclass(frozen=True, kw_only=True)
class StockAssigner:
    """Every sequence in a row of its own (``padded``), or rows filled in order (``packed``); rows hold the context."""

    num_replicas: int
    context_tokens: int
    packing: Packing

    def assign(self, lengths: np.ndarray | Sequence[int]) -> BatchAssignment:
        """ValueError where a sequence is longer than the context."""
        lengths = np.asarray(lengths, dtype=np.int64)
        if len(lengths) and lengths.max() > self.context_tokens:
            raise ValueError(
                f"sample {int(lengths.argmax())}: {lengths.max()} tokens are over the context, {self.context_tokens}"
            )
        rows: list[list[int]] = []
        room = 0
        for sample, length in enumerate(lengths.tolist()):
            if self.packing == "packed" and rows and length <= room:
                rows[-1].append(sample)
            else:
                rows.append([sample])
                room = self.context_tokens
            room -= length
        micro_batches = [
            AssignedMicroBatch(
                samples=tuple(row), num_tokens=int(lengths[row].sum()), num_padded_tokens=self.context_tokens
            )
            for row in rows
        ]
        if not rows:
            return BatchAssignment(packing=self.packing, buckets=())
        replicas = tuple(tuple(micro_batches[r :: self.num_replicas]) for r in range(self.num_replicas))
        bucket = BucketAssignment(bucket=0, replicas=replicas, replica_costs_s=(0.0,) * self.num_replicas)
        return BatchAssignment(packing=self.packing, buckets=(bucket,))
