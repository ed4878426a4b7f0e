"""Documents of indexed data sets as a torch data set: each document one sequence, in an order that resumes exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hotspa_plugin.data import Sample
from hotspa_plugin.data.sequences import SequenceSource


class DocumentDataset(torch.utils.data.Dataset):
    """``num_samples`` sequences of a source, reshuffled every epoch; an item looks like a ``GPTDataset``'s.

    Item i is sequence ``order(i)``, the same for the same seed everywhere. It is padded to ``padded_tokens`` (0: not
    padded), its padding and last position are masked out of the loss. ``choice`` restricts the source to some
    sequences (a split). Stock Megatron can train on it as it is; hot switching reads single sequences.
    """

    def __init__(
        self,
        source: SequenceSource,
        *,
        num_samples: int,
        seed: int,
        padded_tokens: int = 0,
        choice: Sequence[int] | np.ndarray | None = None,
        split: object = None,
    ) -> None:
        self._source = source
        self._num_samples = num_samples
        self._seed = seed
        self._padded_tokens = padded_tokens
        self._choice = np.arange(len(source.lengths)) if choice is None else np.asarray(choice, dtype=np.int64)
        if len(self._choice) == 0:
            raise ValueError("a split of the data set holds no document: give it a larger share with --split")
        self._epoch_order: tuple[int, np.ndarray] | None = None
        self.split = split  # Megatron's loaders ask which split this is

    def __len__(self) -> int:
        return self._num_samples

    def _sequence(self, index: int) -> int:
        epoch, position = divmod(index, len(self._choice))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            # A stream that NumPy has frozen: a run must draw the same order after an upgrade.
            order = np.random.RandomState([self._seed % 2**32, epoch % 2**32]).permutation(self._choice)
            self._epoch_order = (epoch, order)
        return int(self._epoch_order[1][position])

    def sequence_length(self, index: int) -> int:
        """Tokens of item ``index``, padding left out, without reading it."""
        return int(self._source.lengths[self._sequence(index)])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = Sample.from_tokens(self._source.tokens(self._sequence(int(index))))
        length = max(len(sample), self._padded_tokens)
        if self._padded_tokens and len(sample) > self._padded_tokens:
            raise ValueError(f"{self._source.name(self._sequence(int(index)))}: has {len(sample)} tokens, over the "
                             f"{self._padded_tokens} of --seq-length: raise it, or cut longer documents")
        return {
            "tokens": _padded(sample.tokens, length),
            "labels": _padded(sample.labels, length),
            "loss_mask": _padded(sample.loss_mask, length),
            "position_ids": np.arange(length, dtype=np.int64),
        }


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    return np.pad(array, (0, length - len(array)))
