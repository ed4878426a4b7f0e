"""Global batches of single sequences, from the script's own data sets or from documents of an indexed data set."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hotspa_plugin.data import Sample


def sample_of(item: Mapping[str, Any]) -> Sample:
    """A data set's item as a sequence, cut behind its last trained position.

    Under causal attention nothing after that position reaches the loss, so the gradient stays what it was; this is
    the item's true length, padding left out. An item without a target keeps its first token.
    """
    loss_mask = np.asarray(item["loss_mask"], dtype=np.float32)
    trained = np.flatnonzero(loss_mask)
    length = int(trained[-1]) + 1 if len(trained) else 1
    return Sample.from_arrays(
        tokens=np.asarray(item["tokens"])[:length],
        labels=np.asarray(item["labels"])[:length],
        loss_mask=loss_mask[:length],
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DatasetBatch:
    """Items ``indices`` (int64, shape ``[num_sequences]``) of a data set; a ``GlobalBatch``."""

    step: int
    indices: np.ndarray
    lengths: np.ndarray
    read: Callable[[int], Sample]

    def sample(self, position: int) -> Sample:
        return self.read(int(self.indices[position]))


class SampleReader:
    """Reads single sequences of a data set, and knows the lengths of those that were asked for.

    A data set with a ``sequence_length(index)`` tells lengths without reading; of another each rank reads its share
    and tells the rest.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._kept: dict[int, Sample] = {}

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of each item; collective over the world."""
        self._kept.clear()
        if hasattr(self._dataset, "sequence_length"):
            return np.array([self._dataset.sequence_length(int(index)) for index in indices], dtype=np.int64)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = np.zeros(len(indices), dtype=np.int64)
        for position in range(rank, len(indices), world_size):
            index = int(indices[position])
            self._kept[index] = sample_of(self._dataset[index])
            mine[position] = len(self._kept[index])
        lengths = torch.from_numpy(mine).to(torch.cuda.current_device())
        dist.all_reduce(lengths)
        return lengths.cpu().numpy()

    def read(self, index: int) -> Sample:
        """One sequence; only ranks that train on it ask."""
        kept = self._kept.get(index)
        return kept if kept is not None else sample_of(self._dataset[index])


class BatchLoader:
    """Iterates over global batches of a data set in order, from ``num_consumed`` on, as Megatron's sampler does.

    ``batch_size()`` tells the sequences of the next batch, ``step()`` its number. Items left over at the end that do
    not fill a batch are not trained, as in Megatron.
    """

    def __init__(
        self, dataset: Any, num_consumed: int, *, batch_size: Callable[[], int], step: Callable[[], int]
    ) -> None:
        if num_consumed >= len(dataset):
            raise ValueError(f"the data set has {len(dataset)} samples, all consumed already ({num_consumed}): "
                             "train on more data or fewer steps")
        self._reader = SampleReader(dataset)
        self._num_samples = len(dataset)
        self._num_consumed = num_consumed
        self._batch_size = batch_size
        self._step = step

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[DatasetBatch]:
        position = self._num_consumed
        while position + (size := self._batch_size()) <= self._num_samples:
            indices = np.arange(position, position + size, dtype=np.int64)
            yield DatasetBatch(
                step=self._step(), indices=indices, lengths=self._reader.lengths(indices), read=self._reader.read
            )
            position += size


@contextlib.contextmanager
def every_rank_reads() -> Iterator[None]:
    """Makes this rank look like the first of its pipeline and tensor-parallel group, which Megatron lets read data.

    Under some strategy each rank is one that reads.
    """
    overrides = {
        "_MPU_TENSOR_MODEL_PARALLEL_RANK": 0,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": 0,
    }
    before = {name: getattr(parallel_state, name) for name in overrides}
    for name, value in overrides.items():
        setattr(parallel_state, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
