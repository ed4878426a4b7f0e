"""Samples to the tensors of a micro-batch, packed into one row or padded to the longest.

torch is imported where a tensor is made, so that lengths and assignments work without loading it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence, ready to train: int64 ``tokens`` and ``labels``, float32 ``loss_mask``, each of shape ``[n]``."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        if len(shape) != 1 or shape[0] == 0 or self.labels.shape != shape or self.loss_mask.shape != shape:
            raise ValueError(
                f"sample: tokens {shape}, labels {self.labels.shape} and loss mask {self.loss_mask.shape} must be "
                "equally long, 1-d and not empty"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_tokens(cls, tokens: np.ndarray | Sequence[int]) -> Sample:
        """The sample of a whole sequence: position i predicts token i + 1, the last position predicts nothing."""
        tokens = np.asarray(tokens, dtype=np.int64)
        loss_mask = np.ones(len(tokens), dtype=np.float32)
        loss_mask[-1:] = 0
        # the masked label must still be a token id of any vocabulary, so 0
        return cls(tokens=tokens, labels=np.append(tokens[1:], 0), loss_mask=loss_mask)

    @classmethod
    def from_arrays(cls, *, tokens: Any, labels: Any, loss_mask: Any) -> Sample:
        """A sample already shaped by another data set (arrays, lists or CPU tensors)."""
        return cls(
            tokens=np.asarray(tokens, dtype=np.int64),
            labels=np.asarray(labels, dtype=np.int64),
            loss_mask=np.asarray(loss_mask, dtype=np.float32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedMicroBatch:
    """Sequences one after the other in a single row of T tokens, padding last.

    ``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` float32 have shape ``[1, T]``. Segment i is
    ``[cu_seqlens[i], cu_seqlens[i + 1])``; attention must not cross segments. ``cu_seqlens`` is int32 of shape
    ``[num_segments + 1]`` from 0 to T. Padding, if any, is the last segment, with loss mask 0: no sequence sees it and
    it trains nothing. Positions count from 0 in each segment. ``max_seqlen`` is the longest segment.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    lengths: tuple[int, ...]  # true length of each sequence, padding not included

    @property
    def num_padding_tokens(self) -> int:
        return self.tokens.shape[1] - sum(self.lengths)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PaddedMicroBatch:
    """One sequence a row, padded at its end to s tokens.

    All tensors have shape ``[num_rows, s]`` and the dtypes of ``PackedMicroBatch``. Loss mask is 0 on padding; under
    causal attention no token before the padding sees it. Position ids run from 0 to s - 1 in every row.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]  # true length of each row

    @property
    def num_padding_tokens(self) -> int:
        return self.tokens.numel() - sum(self.lengths)


def pack_micro_batch(
    samples: Sequence[Sample], *, length_multiple: int = 1, num_tokens: int | None = None, padding_token: int = 0
) -> PackedMicroBatch:
    """Packs samples in the given order, then pads to a multiple of ``length_multiple``, or to ``num_tokens``.

    ``num_tokens`` serves callers that need one fixed length; it must be such a multiple and hold all samples.
    """
    lengths = _lengths_of(samples, length_multiple)
    total = sum(lengths)
    row_tokens = -(-total // length_multiple) * length_multiple
    if num_tokens is not None:
        if num_tokens < total or num_tokens % length_multiple:
            raise ValueError(
                f"packed row of {num_tokens} tokens: must hold {total} and be a multiple of {length_multiple}"
            )
        row_tokens = num_tokens
    num_padding = row_tokens - total
    segments = [*lengths, num_padding] if num_padding else lengths

    def row(name: str, fill: int, dtype: type) -> np.ndarray:
        parts = [getattr(sample, name) for sample in samples]
        return np.concatenate([*parts, np.full(num_padding, fill, dtype=dtype)]).astype(dtype)[None]

    return PackedMicroBatch(
        tokens=_tensor(row("tokens", padding_token, np.int64)),
        labels=_tensor(row("labels", padding_token, np.int64)),
        loss_mask=_tensor(row("loss_mask", 0, np.float32)),
        position_ids=_tensor(np.concatenate([np.arange(length, dtype=np.int64) for length in segments])[None]),
        cu_seqlens=_tensor(np.cumsum([0, *segments], dtype=np.int32)),
        max_seqlen=max(segments),
        lengths=tuple(lengths),
    )


def pad_micro_batch(
    samples: Sequence[Sample], *, length_multiple: int = 1, num_tokens: int | None = None, padding_token: int = 0
) -> PaddedMicroBatch:
    """One row per sample, padded to the longest rounded up to ``length_multiple``, or to ``num_tokens`` a row."""
    lengths = _lengths_of(samples, length_multiple)
    row_tokens = -(-max(lengths) // length_multiple) * length_multiple
    if num_tokens is not None:
        if num_tokens < max(lengths) or num_tokens % length_multiple:
            raise ValueError(
                f"padded rows of {num_tokens} tokens: must hold {max(lengths)} and be a multiple of {length_multiple}"
            )
        row_tokens = num_tokens

    def rows(name: str, fill: int, dtype: type) -> np.ndarray:
        array = np.full((len(samples), row_tokens), fill, dtype=dtype)
        for index, sample in enumerate(samples):
            array[index, : len(sample)] = getattr(sample, name)
        return array

    return PaddedMicroBatch(
        tokens=_tensor(rows("tokens", padding_token, np.int64)),
        labels=_tensor(rows("labels", padding_token, np.int64)),
        loss_mask=_tensor(rows("loss_mask", 0, np.float32)),
        position_ids=_tensor(np.tile(np.arange(row_tokens, dtype=np.int64), (len(samples), 1))),
        lengths=tuple(lengths),
    )


def _lengths_of(samples: Sequence[Sample], length_multiple: int) -> list[int]:
    if len(samples) == 0:
        raise ValueError("micro-batch: holds no samples: a replica without work has no micro-batches at all")
    if length_multiple < 1:
        raise ValueError(f"micro-batch: length multiple {length_multiple} must be at least 1")
    return [len(sample) for sample in samples]


def _tensor(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
