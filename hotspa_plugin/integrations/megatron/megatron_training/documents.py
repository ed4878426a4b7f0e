"""Documents of indexed data sets as a torch data set: each document one sequence, in an order that resumes exactly."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split

from hotspa_plugin.data import RandomTokenSource, Sample
from hotspa_plugin.data.indexed_dataset import IndexedDatasetSource
from hotspa_plugin.data.length_distributions import draw_lengths
from hotspa_plugin.data.overlong import LimitedSource
from hotspa_plugin.data.sequences import SequenceSource

_SPLITS = (Split.train, Split.valid, Split.test)
_MOCK_SEQUENCES = 1 << 16  # drawn anew in another order every epoch


class DocumentDataset(torch.utils.data.Dataset):
    """``num_samples`` sequences of a source, reshuffled every epoch; an item looks like a ``GPTDataset``'s.

    Item i is the same for the same seed everywhere. It is padded to ``padded_tokens`` (0: not padded); its padding and
    last position are masked out of the loss. ``choice`` restricts the source to some sequences (a split). Stock
    Megatron can train on it as it is; hot switching reads single sequences.
    """

    def __init__(
        self,
        source: SequenceSource,
        *,
        num_samples: int,
        seed: int,
        padded_tokens: int = 0,
        choice: Sequence[int] | np.ndarray | None = None,
        split: Split | None = None,
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
            raise ValueError(
                f"{self._source.name(self._sequence(int(index)))}: has {len(sample)} tokens, over the "
                f"{self._padded_tokens} of --seq-length: raise it, or cut longer documents"
            )
        return {
            "tokens": _padded(sample.tokens, length),
            "labels": _padded(sample.labels, length),
            "loss_mask": _padded(sample.loss_mask, length),
            "position_ids": np.arange(length, dtype=np.int64),
        }


class BlendedDocuments(torch.utils.data.Dataset):
    """Several data sets mixed by weight, in the order of Megatron's own blending."""

    def __init__(self, datasets: Sequence[DocumentDataset], weights: Sequence[float], num_samples: int) -> None:
        from megatron.core.datasets import helpers

        self._datasets = datasets
        self.split = datasets[0].split
        self._dataset_of = np.zeros(num_samples, dtype=np.int16)
        self._index_in = np.zeros(num_samples, dtype=np.int64)
        shares = np.asarray(weights, dtype=np.float64)
        helpers.build_blending_indices(
            self._dataset_of, self._index_in, shares / shares.sum(), len(datasets), num_samples, False
        )

    def __len__(self) -> int:
        return len(self._dataset_of)

    def sequence_length(self, index: int) -> int:
        """Tokens of item ``index``, padding left out, without reading it."""
        return self._datasets[self._dataset_of[index]].sequence_length(int(self._index_in[index]))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._datasets[self._dataset_of[index]][int(self._index_in[index])]


def document_sets(
    args: argparse.Namespace, num_samples: Sequence[int | None], *, bound_tokens: int, padded_tokens: int = 0
) -> tuple[Any, Any, Any]:
    """Training, validation and test sets of single documents, from ``--data-path`` and its like, or random ones.

    Splits are ranges of documents in the order of the index, as Megatron takes them. A set of which no samples are
    wanted, or whose share is 0, is None. Raises ValueError for documents over ``bound_tokens`` under ``error``.
    """
    build = functools.partial(_build_split, args, bound_tokens=bound_tokens, padded_tokens=padded_tokens)
    if args.mock_data:
        source = _mock_source(args, bound_tokens)
        whole = {"seed": args.seed, "padded_tokens": padded_tokens}
        return tuple(
            DocumentDataset(source, num_samples=n, split=split, **whole) if n else None
            for split, n in zip(_SPLITS, num_samples, strict=True)
        )
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend_per_split is not None:
        sets = [
            build(blend=own, share=(0.0, 1.0), num_samples=n, split=split) if own else None
            for own, n, split in zip(blend_per_split, num_samples, _SPLITS, strict=True)
        ]
    elif blend is not None:
        shares = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
        sets = [
            build(blend=blend, share=share, num_samples=n, split=split) if share else None
            for share, n, split in zip(shares, num_samples, _SPLITS, strict=True)
        ]
    else:
        raise ValueError(
            "--hotspa-sample-unit document needs documents: give --data-path, or --mock-data with "
            "--hotspa-mock-lengths, or take the script's own samples with --hotspa-sample-unit sample"
        )
    return tuple(sets)


def _build_split(
    args: argparse.Namespace,
    *,
    blend: tuple[list[str], list[float] | None],
    share: tuple[float, float],
    num_samples: int | None,
    split: Split,
    bound_tokens: int,
    padded_tokens: int,
) -> Any:
    if not num_samples:
        return None
    prefixes, weights = blend
    datasets, sizes = [], []
    for prefix in prefixes:
        source = IndexedDatasetSource(prefix, vocab_size=args.padded_vocab_size)
        limited = LimitedSource(source, bound_tokens=bound_tokens, policy=args.hotspa_overlong)
        if args.rank == 0 and limited.counts.num_overlong:
            print(f" > hotspa: {prefix}: {limited.counts}", flush=True)
        low, high = (round(bound * len(limited.lengths)) for bound in share)
        sizes.append(high - low)
        datasets.append(
            DocumentDataset(
                limited, num_samples=num_samples, seed=args.seed, padded_tokens=padded_tokens,
                choice=range(low, high), split=split,
            )
        )  # fmt: skip
    return datasets[0] if len(datasets) == 1 else BlendedDocuments(datasets, weights or sizes, num_samples)


def _mock_source(args: argparse.Namespace, bound_tokens: int) -> SequenceSource:
    spec = args.hotspa_mock_lengths or "wikipedia"
    lengths = draw_lengths(spec, _MOCK_SEQUENCES, seed=args.seed, max_tokens=bound_tokens)
    return RandomTokenSource(lengths, vocab_size=args.padded_vocab_size, seed=args.seed)


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    return np.pad(array, (0, length - len(array)))
