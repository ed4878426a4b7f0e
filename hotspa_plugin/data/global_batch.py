"""The sequences of one optimizer step: what every kind of batch offers, and one that is read when it is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hotspa_plugin.data.micro_batch import Sample
from hotspa_plugin.data.sequences import SequenceSource


class GlobalBatch(Protocol):
    """The sequences of one optimizer step, whose lengths are known before any of them is read."""

    step: int
    lengths: np.ndarray  # tokens, int64, shape [num_sequences]

    def sample(self, position: int) -> Sample: ...


class ScatteredBatch(GlobalBatch, Protocol):
    """A global batch of which no rank holds everything."""

    def fetch(self, needed_by_rank: Sequence[Sequence[int]]) -> None:
        """Brings the sequences that each rank needs, by position, to it. Collective over the world."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SequenceBatch:
    """Sequences ``indices`` (int64, shape ``[num_sequences]``) of ``source``, for optimizer step ``step``."""

    step: int
    source: SequenceSource
    indices: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 of shape ``[num_sequences]``."""
        return np.asarray(self.source.lengths)[self.indices]

    def sample(self, position: int) -> Sample:
        """The sequence at ``position`` of this batch, ready to train."""
        return Sample.from_tokens(self.source.tokens(int(self.indices[position])))
