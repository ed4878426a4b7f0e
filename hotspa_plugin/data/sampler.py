"""Which sequences make up each global batch."""

from __future__ import annotations

from typing import Any

import numpy as np


class GlobalBatchSampler:
    """Cuts an endless, per epoch reshuffled list of sequences into global batches.

    A batch holds ``num_sequences`` sequences, or as many as fit into ``num_tokens`` (a single longer one makes its
    own batch). Batches run on over the end of an epoch, so nothing is dropped; a batch larger than the data holds a
    sequence more than once. Every rank builds the same batches from the same arguments, and ``state_dict`` continues
    at the next sequence exactly, also with another batch size.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        num_sequences: int | None = None,
        num_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if (num_sequences is None) == (num_tokens is None):
            raise ValueError("global batch: give its size either in sequences or in tokens")
        size = num_sequences if num_sequences is not None else num_tokens
        if size < 1:
            raise ValueError(f"global batch of {size}: must be at least 1")
        if len(lengths) == 0:
            raise ValueError("global batch: there are no sequences to draw from")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._num_sequences = num_sequences
        self._num_tokens = num_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._num_consumed = 0  # over all epochs
        self._order_of_epoch: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        return self._num_consumed // len(self._lengths)

    @property
    def num_consumed(self) -> int:
        """Sequences handed out so far, over all epochs."""
        return self._num_consumed

    def _order(self, epoch: int) -> np.ndarray:
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            if self._shuffle:
                # RandomState's streams are frozen by NumPy's policy, those of Generator are not: a run must
                # draw the same batches after an upgrade
                order = np.random.RandomState([self._seed % 2**32, epoch % 2**32]).permutation(len(self._lengths))
            else:
                order = np.arange(len(self._lengths))
            self._order_of_epoch = (epoch, order)
        return self._order_of_epoch[1]

    def next_batch(self) -> np.ndarray:
        """Indices of the sequences of the next global batch, int64 of shape ``[num_sequences]``, at least one."""
        batch: list[int] = []
        num_tokens = 0
        while self._num_sequences is None or len(batch) < self._num_sequences:
            epoch, position = divmod(self._num_consumed, len(self._lengths))
            index = int(self._order(epoch)[position])
            num_tokens += int(self._lengths[index])
            if self._num_tokens is not None and batch and num_tokens > self._num_tokens:
                break
            batch.append(index)
            self._num_consumed += 1
        return np.array(batch, dtype=np.int64)

    def peek(self) -> np.ndarray:
        """What ``next_batch`` will return."""
        num_consumed = self._num_consumed
        batch = self.next_batch()
        self._num_consumed = num_consumed
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands, as plain JSON values."""
        epoch, position = divmod(self._num_consumed, len(self._lengths))
        return {
            "epoch": epoch,
            "num_consumed_in_epoch": position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_sequences_in_epoch": len(self._lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken; ValueError where it belongs to other data or another order."""
        for key, mine in self.state_dict().items():
            if key in ("epoch", "num_consumed_in_epoch"):
                continue
            if state[key] != mine:
                raise ValueError(
                    f"data position: saved with {key} {state[key]}, this run has {mine}: "
                    "resume with the same data and seed, or start a new run"
                )
        self._num_consumed = state["epoch"] * len(self._lengths) + state["num_consumed_in_epoch"]
