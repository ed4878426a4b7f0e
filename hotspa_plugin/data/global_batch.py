"""The sequences of one optimizer step, read one by one when they are needed."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.data.micro_batch import Sample
from hotspa_plugin.data.sequences import SequenceSource


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
