"""Global batches of single sequences, read from data sets in the order in which Megatron would read their samples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from hotspa_plugin.data import Sample


def sequences_of(item: Mapping[str, Any]) -> list[Sample]:
    """The sequences in a data set's item: one, or the segments of its ``cu_seqlens`` where it is a pack of several.

    Each is cut behind its last trained position: under causal attention nothing after it reaches the loss, so the
    gradient stays what it was, and what is left is the sequence's true length. One without any target keeps its first
    token, and trains nothing.
    """
    tokens, labels = np.asarray(item["tokens"]), np.asarray(item["labels"])
    loss_mask = np.asarray(item["loss_mask"], dtype=np.float32)
    bounds = [0, len(tokens)]
    if item.get("cu_seqlens") is not None:
        # Loaders pad the bounds at the end so that they can be stacked.
        bounds = sorted({*np.asarray(item["cu_seqlens"]).reshape(-1).tolist(), len(tokens)})
    sequences = []
    for start, end in zip(bounds, bounds[1:]):
        trained = np.flatnonzero(loss_mask[start:end])
        if len(trained) == 0 and start > 0:
            continue  # the padding of a pack, or a segment that trains nothing
        stop = start + (int(trained[-1]) + 1 if len(trained) else 1)
        sequences.append(
            Sample.from_arrays(tokens=tokens[start:stop], labels=labels[start:stop], loss_mask=loss_mask[start:stop])
        )
    return sequences


def limited(sequences: list[Sample], bound_tokens: int, policy: str) -> list[Sample]:
    """``sequences`` with none over the bound: cut, split into pieces or left out, as ``policy`` says.

    Raises ValueError under ``error``. Pieces keep their labels, so that no target is lost.
    """
    kept = []
    for sequence in sequences:
        if len(sequence) <= bound_tokens:
            kept.append(sequence)
        elif policy == "error":
            raise ValueError(
                f"a sample has {len(sequence)} tokens, over the last bound of --hotspa-pool, {bound_tokens}: "
                "raise that bound, or say with --hotspa-overlong what to do with it"
            )
        elif policy != "drop":
            stop = bound_tokens if policy == "truncate" else len(sequence)
            kept += [_cut(sequence, start, start + bound_tokens) for start in range(0, stop, bound_tokens)]
    return kept


def limited_lengths(length: int, bound_tokens: int, policy: str) -> list[int]:
    """Lengths of what :func:`limited` makes of a sequence of ``length`` tokens; left to it where that is an error."""
    if length <= bound_tokens or policy == "error":
        return [length]
    if policy == "drop":
        return []
    stop = bound_tokens if policy == "truncate" else length
    return [min(bound_tokens, length - start) for start in range(0, stop, bound_tokens)]


def _cut(sequence: Sample, start: int, stop: int) -> Sample:
    return Sample(
        tokens=sequence.tokens[start:stop], labels=sequence.labels[start:stop], loss_mask=sequence.loss_mask[start:stop]
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DatasetBatch:
    """Sequences of consecutive items of a data set; a ``GlobalBatch``.

    ``places`` (int64, shape ``[num_sequences, 2]``) tells the item of each sequence and which of its sequences it is.
    """

    step: int
    lengths: np.ndarray
    places: np.ndarray
    read: Callable[[int], list[Sample]]

    def sample(self, position: int) -> Sample:
        item, part = self.places[position]
        return self.read(int(item))[part]


class ItemReader:
    """Reads a data set's items as sequences, and finds out lengths before the whole batch is read.

    A data set with a ``sequence_length(index)`` tells lengths without reading; of another each rank reads its share
    and tells the rest.
    """

    def __init__(self, dataset: Any, bound_tokens: int, overlong: str) -> None:
        self._dataset = dataset
        self._limits = bound_tokens, overlong
        self._kept: dict[int, list[Sample]] = {}

    def lengths(self, items: range) -> list[list[int]]:
        """Tokens of each sequence of each item; collective over the world."""
        self._kept.clear()
        if hasattr(self._dataset, "sequence_length"):
            return [limited_lengths(self._dataset.sequence_length(item), *self._limits) for item in items]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for item in items[rank::world_size]:
            self._kept[item] = limited(sequences_of(self._dataset[item]), *self._limits)
        mine = [[len(sequence) for sequence in self._kept[item]] for item in items[rank::world_size]]
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, mine)
        return [everyone[position % world_size][position // world_size] for position in range(len(items))]

    def read(self, item: int) -> list[Sample]:
        """The sequences of one item; only ranks that train on one of them ask."""
        if item not in self._kept:
            self._kept[item] = limited(sequences_of(self._dataset[item]), *self._limits)
        return self._kept[item]


class BatchLoader:
    """Iterates over global batches of a data set in order, from item ``num_consumed`` on, as Megatron's sampler does.

    ``batch_size()`` tells the items of the next batch, ``step()`` its number. Sequences over ``bound_tokens`` are
    treated as ``overlong`` says. ``prepare`` is told the lengths of the batch after each one. Items left over at the
    end that do not fill a batch are not trained, as in Megatron.
    """

    def __init__(
        self,
        dataset: Any,
        num_consumed: int,
        *,
        batch_size: Callable[[], int],
        step: Callable[[], int],
        bound_tokens: int,
        overlong: str = "error",
        prepare: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        if num_consumed >= len(dataset):
            raise ValueError(
                f"the data set has {len(dataset)} samples, all consumed already ({num_consumed}): "
                "train on more data or fewer steps"
            )
        self._reader = ItemReader(dataset, bound_tokens, overlong)
        self._num_items = len(dataset)
        self._num_consumed = num_consumed
        self._batch_size = batch_size
        self._step = step
        # Only lengths that need no reading are looked up ahead.
        self._prepare = prepare if hasattr(dataset, "sequence_length") else None

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[DatasetBatch]:
        position = self._num_consumed
        while position + (size := self._batch_size()) <= self._num_items:
            items = range(position, position + size)
            lengths = self._reader.lengths(items)
            if self._prepare is not None and position + 2 * size <= self._num_items:
                coming = self._reader.lengths(range(position + size, position + 2 * size))
                self._prepare(np.array([n for of_item in coming for n in of_item], dtype=np.int64))
            yield DatasetBatch(
                step=self._step(),
                lengths=np.array([n for of_item in lengths for n in of_item], dtype=np.int64),
                places=np.array(
                    [(item, part) for item, of_item in zip(items, lengths) for part in range(len(of_item))],
                    dtype=np.int64,
                ).reshape(-1, 2),
                read=self._reader.read,
            )
            position += size


@contextlib.contextmanager
def every_rank_reads() -> Iterator[None]:
    """Makes this rank look like the first of its pipeline and tensor-parallel group, which Megatron lets read data.

    Under some strategy each rank is one that reads.
    """
    overrides = {"_MPU_TENSOR_MODEL_PARALLEL_RANK": 0, "_MPU_PIPELINE_MODEL_PARALLEL_RANK": 0}
    before = {name: getattr(parallel_state, name) for name in overrides}
    for name, value in overrides.items():
        setattr(parallel_state, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
