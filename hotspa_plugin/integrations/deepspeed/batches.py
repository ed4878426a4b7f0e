"""What users pass as a batch, as the global batch that the buckets are filled from."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.data import GlobalBatchSampler, OverlongPolicy, Sample
from hotspa_plugin.data.exchange import exchange_samples
from hotspa_plugin.data.global_batch import GlobalBatch
from hotspa_plugin.runtime.agreement import check_agreement

IGNORED_LABEL = -100  # what Hugging Face and torch's cross entropy leave out


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampleBatch:
    """Samples that every rank holds."""

    step: int
    samples: Sequence[Sample]
    num_overlong: int = 0  # sequences that were truncated, split or dropped

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(sample) for sample in self.samples], dtype=np.int64)

    def sample(self, position: int) -> Sample:
        return self.samples[position]


@dataclasses.dataclass(kw_only=True, eq=False)
class PartBatch:
    """Samples of which each rank holds its part: those of rank 0 first, then those of rank 1, and so on.

    ``lengths`` (tokens, int64, shape ``[num_sequences]``) and ``holders`` (who holds each) are known to all, ``own``
    are this rank's by position. ``sample`` gives what ``fetch`` has brought for this rank to train.
    """

    step: int
    lengths: np.ndarray
    holders: Sequence[int]
    own: Mapping[int, Sample]
    device: torch.device
    num_overlong: int = 0
    _fetched: dict[int, Sample] = dataclasses.field(default_factory=dict)

    def fetch(self, needed_by_rank: Sequence[Sequence[int]]) -> None:
        rows = exchange_samples(
            needed_by_rank,
            readers=[[rank] for rank in self.holders],
            lengths=self.lengths,
            read=lambda position: _to_rows(self.own[position]),
            num_rows=3,
            device=self.device,
        )
        self._fetched = {position: _from_rows(found) for position, found in rows.items()}

    def sample(self, position: int) -> Sample:
        return self._fetched[position]


def _to_rows(sample: Sample) -> np.ndarray:
    """Tokens, labels and the bits of the loss mask: int64, shape ``[3, tokens]``."""
    return np.stack([sample.tokens, sample.labels, sample.loss_mask.view(np.int32)])


def _from_rows(rows: np.ndarray) -> Sample:
    tokens, labels, mask_bits = rows
    return Sample(tokens=tokens, labels=labels, loss_mask=mask_bits.astype(np.int32).view(np.float32))


def to_samples(batch: Any, *, vocab_size: int | None = None) -> list[Sample]:
    """The sequences of a batch, in order.

    ``batch`` is a list of sequences (token ids, or mappings with ``input_ids`` and perhaps ``labels`` and
    ``attention_mask``), or one such mapping of equally long rows. Labels stand at the token they name, as Hugging
    Face models take them, with -100 where nothing is trained; without labels every token but the first is a target.
    Padding, where the attention mask is 0, must be at the end. Raises ValueError naming the sample.
    """
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise ValueError(f"batch: holds {', '.join(map(str, batch))}, but no input_ids")
        keys = [key for key in ("input_ids", "labels", "attention_mask") if batch.get(key) is not None]
        for key in keys:
            if len(batch[key]) != len(batch["input_ids"]):
                raise ValueError(f"batch: {len(batch[key])} rows of {key} for {len(batch['input_ids'])} of input_ids")
        batch = [dict(zip(keys, row)) for row in zip(*(batch[key] for key in keys), strict=True)]
    if isinstance(batch, (torch.Tensor, np.ndarray)) and batch.ndim != 2:
        raise ValueError(
            f"batch: an array of shape {tuple(batch.shape)} is no batch: give [sequences, tokens] or a list"
        )
    if isinstance(batch, str) or not isinstance(batch, Iterable):
        raise ValueError(f"batch: a {type(batch).__name__} is no batch: give a list of sequences")
    samples = [_to_sample(item, f"sample {index}") for index, item in enumerate(batch)]
    if vocab_size is not None:
        for index, sample in enumerate(samples):
            for what, ids in (("token", sample.tokens), ("label", sample.labels)):
                outside = (ids < 0) | (ids >= vocab_size)
                if outside.any():
                    where = int(outside.argmax())
                    raise ValueError(
                        f"sample {index}: {what} {ids[where]} at position {where} is outside the vocabulary of "
                        f"{vocab_size}"
                    )
    return samples


def _to_sample(item: Any, name: str) -> Sample:
    if isinstance(item, Sample):
        return item
    labels = mask = None
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise ValueError(f"{name}: holds {', '.join(map(str, item))}, but no input_ids")
        item, labels, mask = item["input_ids"], item.get("labels"), item.get("attention_mask")
    tokens = _whole_numbers(item, f"{name}: input_ids")
    labels = None if labels is None else _whole_numbers(labels, f"{name}: labels")
    if labels is not None and labels.shape != tokens.shape:
        raise ValueError(f"{name}: {len(labels)} labels for {len(tokens)} tokens")
    if mask is not None:
        mask = _whole_numbers(mask, f"{name}: attention_mask")
        if mask.size and not (0 <= mask.min() and mask.max() <= 1):
            raise ValueError(f"{name}: its attention mask holds other numbers than 0 and 1")
        length = int((mask != 0).sum())
        if mask.shape != tokens.shape or not (mask[:length] != 0).all():
            raise ValueError(f"{name}: its attention mask has gaps or padding in front: pad at the end, or do not pad")
        tokens, labels = tokens[:length], None if labels is None else labels[:length]
    if len(tokens) == 0:
        raise ValueError(f"{name}: has no tokens: leave empty sequences out")
    if labels is None:
        return Sample.from_tokens(tokens)
    # The target of a position is the label at the next one.
    targets = np.append(labels[1:], IGNORED_LABEL)
    trained = targets != IGNORED_LABEL
    return Sample(tokens=tokens, labels=np.where(trained, targets, 0), loss_mask=trained.astype(np.float32))


def _whole_numbers(values: Any, name: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths inside
        raise ValueError(f"{name}: expected a row of whole numbers, got rows within it") from None
    if array.ndim != 1 or array.dtype.kind not in "iub" and array.size:
        raise ValueError(f"{name}: expected a row of whole numbers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def limit_lengths(samples: Sequence[Sample], *, bound_tokens: int, policy: OverlongPolicy) -> list[Sample]:
    """The samples with none over ``bound_tokens``, as ``policy`` says (see ``data.overlong.LimitedSource``).

    A piece of a sample is what the same piece of its tokens and labels would be as a sample of its own, so its last
    position has no target. Raises ValueError naming the sample under ``error``.
    """
    limited: list[Sample] = []
    for index, sample in enumerate(samples):
        if len(sample) <= bound_tokens:
            limited.append(sample)
        elif policy == "error":
            raise ValueError(
                f"sample {index}: {len(sample)} tokens are over the last bound, {bound_tokens}: raise the bound in "
                "hotspa.pool, or set hotspa.overlong to truncate, split or drop"
            )
        elif policy == "truncate":
            limited.append(_piece(sample, 0, bound_tokens))
        elif policy == "split":
            limited += [_piece(sample, start, bound_tokens) for start in range(0, len(sample), bound_tokens)]
    return limited


def _piece(sample: Sample, start: int, num_tokens: int) -> Sample:
    part = slice(start, start + num_tokens)
    labels, loss_mask = sample.labels[part].copy(), sample.loss_mask[part].copy()
    labels[-1], loss_mask[-1] = 0, 0
    return Sample(tokens=sample.tokens[part], labels=labels, loss_mask=loss_mask)


def as_global_batch(
    batch: Any,
    *,
    step: int,
    per_rank: bool,
    vocab_size: int | None,
    bound_tokens: int,
    overlong: OverlongPolicy,
    device: torch.device,
) -> GlobalBatch:
    """``batch`` as a global batch; collective over the world.

    With ``per_rank`` the batches of all ranks together are the global one, in rank order; else all hold it alike. What
    has ``lengths`` and ``sample`` is a global batch already, and only gets its step. Raises ValueError for what
    ``to_samples`` and ``limit_lengths`` refuse, and for a batch without a target, on every rank, and RuntimeError where
    ranks were given different batches.
    """
    if hasattr(batch, "lengths") and hasattr(batch, "sample"):
        return (
            batch
            if batch.step == step or not dataclasses.is_dataclass(batch)
            else dataclasses.replace(batch, step=step)
        )
    problem, samples, num_overlong = None, [], 0
    try:
        samples = to_samples(batch, vocab_size=vocab_size)
        num_overlong = sum(len(sample) > bound_tokens for sample in samples)
        samples = limit_lengths(samples, bound_tokens=bound_tokens, policy=overlong)
    except ValueError as error:
        problem = str(error)
    if per_rank:
        return _scattered(samples, problem, num_overlong, step=step, device=device)
    digest = hashlib.sha256(str(problem).encode())
    for sample in samples:
        for array in (sample.tokens, sample.labels, sample.loss_mask):
            digest.update(array.tobytes())
    check_agreement(
        f"the batch of step {step} (give every rank the whole batch, or set hotspa.batch to per_rank)",
        digest.hexdigest(), device=device,
    )  # fmt: skip
    _refuse(problem, len(samples), any(sample.loss_mask.any() for sample in samples))
    return SampleBatch(step=step, samples=samples, num_overlong=num_overlong)


def _scattered(
    samples: Sequence[Sample], problem: str | None, num_overlong: int, *, step: int, device: torch.device
) -> PartBatch:
    """The global batch that the ranks' ``samples`` make up; only lengths are gathered."""
    has_target = any(sample.loss_mask.any() for sample in samples)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (problem, num_overlong, has_target, [len(sample) for sample in samples]))
    problem = next((f"rank {rank}: {said}" for rank, (said, *_) in enumerate(gathered) if said), None)
    lengths = np.array([length for *_, lengths in gathered for length in lengths], dtype=np.int64)
    _refuse(problem, len(lengths), any(has_target for _, _, has_target, _ in gathered))
    holders = [rank for rank, (*_, lengths) in enumerate(gathered) for _ in lengths]
    own = [position for position, rank in enumerate(holders) if rank == dist.get_rank()]
    return PartBatch(
        step=step, lengths=lengths, holders=holders, own=dict(zip(own, samples, strict=True)), device=device,
        num_overlong=sum(number for _, number, *_ in gathered),
    )  # fmt: skip


def _refuse(problem: str | None, num_samples: int, has_target: bool) -> None:
    if problem is None and not has_target:
        problem = "batch: has no target token, so there is nothing to train" if num_samples else "batch: is empty"
    if problem:
        raise ValueError(problem)


class GlobalBatchLoader:
    """An iterable over lists of items of ``dataset``, one list per optimizer step, the same on every rank.

    One pass yields as many batches as an epoch needs; the next goes on where it ended, reshuffled each epoch.
    """

    def __init__(self, dataset: Any, *, num_sequences: int, seed: int, shuffle: bool = True) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"training_data: a {type(dataset).__name__} has no length or no items by number; pass batches to "
                "train_batch instead"
            )
        if not len(dataset):
            raise ValueError("training_data: is empty")
        self.dataset = dataset
        self._num_sequences = num_sequences
        # Batches are counted in sequences, so the sampler need not know lengths.
        self.sampler = GlobalBatchSampler(
            np.ones(len(dataset), dtype=np.int64), num_sequences=num_sequences, seed=seed, shuffle=shuffle
        )

    def __len__(self) -> int:
        return -(-len(self.dataset) // self._num_sequences)

    def __iter__(self) -> Iterator[list[Any]]:
        for _ in range(len(self)):
            yield [self.dataset[int(index)] for index in self.sampler.next_batch()]
