"""Runs one strategy's micro-batches through Megatron's own schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from hotspa_plugin.data.micro_batch import PackedMicroBatch, PaddedMicroBatch
from hotspa_plugin.integrations.megatron import random_state
from hotspa_plugin.integrations.megatron.strategy_modules import StrategyModules
from hotspa_plugin.runtime.activity import current_activity, set_activity
from hotspa_plugin.runtime.bucket_loop import MicroBatch

LOSS_KEY = "lm loss"
ForwardStep = Callable[[Iterator, torch.nn.Module], tuple[torch.Tensor, Callable]]


class MicroBatchCursor:
    """What a forward step sees as its data iterator: ``next`` gives the current micro-batch, however often it is asked.

    Some ranks read (the first tensor-parallel one of the first and last stage, say) and some do not; advancing it
    before each forward step keeps them together all the same.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], present: Callable[[MicroBatch], Any]) -> None:
        self._micro_batches = micro_batches
        self._present = present
        self._position = -1

    def advance(self) -> int:
        """Moves to the next micro-batch and returns its position."""
        self._position += 1
        return self._position

    @property
    def current(self) -> MicroBatch:
        return self._micro_batches[self._position]

    def __iter__(self) -> MicroBatchCursor:
        return self

    def __next__(self) -> Any:
        return self._present(self.current)


class MegatronRunner:
    """A ``BucketRunner`` over the modules of one strategy.

    ``forward_step`` is Megatron's: it takes an iterator over what ``present`` makes of each micro-batch, and
    the model. Its loss function must return (loss sum, target tokens, {name: [loss sum, target tokens]}).
    ``before_forward`` is called with every micro-batch before its forward step, on every stage.
    """

    def __init__(
        self,
        modules: StrategyModules,
        *,
        seed: int,
        forward_step: ForwardStep | None = None,
        present: Callable[[MicroBatch], Any] | None = None,
        before_forward: Callable[[MicroBatch], None] | None = None,
    ) -> None:
        self.modules = modules
        self.label = modules.label
        self.dp_rank = modules.coordinate.dp
        self.forward_step = forward_step or gpt_forward_step
        self._present = present or to_device
        self._before_forward = before_forward or (lambda micro_batch: None)
        self._seed = seed

    def run(
        self, step: int, bucket: int, micro_batches: Sequence[MicroBatch], *, forward_only: bool = False
    ) -> torch.Tensor:
        place = self.modules.coordinate
        if len(self.modules.chunks) > 1:
            micro_batches = fill_interleaved(micro_batches, self.modules.config.pipeline_model_parallel_size)
        # One for each model chunk, as Megatron's interleaved schedule has it.
        cursors = [MicroBatchCursor(micro_batches, self._present) for _ in self.modules.chunks]

        def seeded_forward_step(cursor: MicroBatchCursor, model: torch.nn.Module, *rest: Any):
            position = cursor.advance()
            chunk = next(index for index, other in enumerate(cursors) if other is cursor)
            random_state.seed_micro_batch(self._seed, step, bucket, position, place, chunk=chunk)
            self._before_forward(cursor.current)
            set_activity(f"{doing}: forward {position + 1} of {len(micro_batches)}")
            output, *others = self.forward_step(cursor, model, *rest)
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: set_activity(f"{doing}: backward"))
            return output, *others

        doing = current_activity()
        first = micro_batches[0].tokens
        reports = self.modules.run(
            seeded_forward_step,
            cursors if len(cursors) > 1 else cursors[0],
            num_microbatches=len(micro_batches),
            # Only a hint: stages tell each other the shape of every micro-batch.
            seq_length=first.shape[1],
            micro_batch_size=first.shape[0],
            forward_only=forward_only,
        )
        total = torch.zeros(2, dtype=torch.float64)
        if place.tp == 0:  # tensor-parallel peers report the same
            for report in reports:
                total += report[LOSS_KEY].to(device="cpu", dtype=torch.float64)
        return total


def fill_interleaved(micro_batches: Sequence[MicroBatch], num_stages: int) -> list[MicroBatch]:
    """Adds micro-batches that train nothing until their number is a multiple of ``num_stages``.

    Megatron's interleaved schedule works in groups of one micro-batch per stage.
    """
    last = micro_batches[-1]
    if isinstance(last, PaddedMicroBatch):  # one row is enough
        rows = {name: getattr(last, name)[:1] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        last = dataclasses.replace(last, **rows, lengths=last.lengths[:1])
    nothing = dataclasses.replace(last, loss_mask=torch.zeros_like(last.loss_mask))
    return [*micro_batches, *[nothing] * (-len(micro_batches) % num_stages)]


def gpt_forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Megatron's ``forward_step`` for a ``GPTModel`` on our micro-batches, the same on every pipeline stage."""
    batch = next(iterator)
    packed = packed_seq_params(batch) if isinstance(batch, PackedMicroBatch) else None
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=packed)
    return output, functools.partial(per_token_loss, batch.loss_mask)


def packed_seq_params(batch: PackedMicroBatch) -> PackedSeqParams:
    """What Megatron's attention must know of a packed micro-batch."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def per_token_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum of the masked losses, number of target tokens, and both once more for the report."""
    loss_mask = loss_mask.view(-1)
    loss_sum = torch.sum(losses.float().view(-1) * loss_mask)
    num_targets = loss_mask.sum()
    report = torch.stack([loss_sum.detach(), num_targets])
    return loss_sum, num_targets.to(torch.int), {LOSS_KEY: report}


def to_device(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with its tensors on this rank's device."""
    device = torch.cuda.current_device()
    moved = {
        field.name: value.to(device, non_blocking=True)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **moved)
