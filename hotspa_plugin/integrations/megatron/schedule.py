"""The hot switch as a schedule: a drop-in for the function that Megatron's training loop calls each step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin.data.global_batch import GlobalBatch
from hotspa_plugin.integrations.megatron import overlap
from hotspa_plugin.integrations.megatron.checked import checked_switches
from hotspa_plugin.integrations.megatron.runner import LOSS_KEY
from hotspa_plugin.integrations.megatron.strategy_modules import StrategyModules
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.bucket_loop import BatchResult, BucketLoop
from hotspa_plugin.runtime.damage_checks import fingerprints

# What Megatron's loop passes along and this schedule needs not: each strategy has its own groups, modules and
# micro-batches, and shapes travel with the micro-batches.
_UNUSED = frozenset({"model", "num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length",
                     "pg_collection", "first_val_step"})  # fmt: skip


class HotSwitchSchedule:
    """Has the signature of Megatron's forward-backward function and runs all buckets of a global batch.

    The data iterator yields ``GlobalBatch`` objects (of a list, one per model chunk, the first is read). Gradients
    are finished once, at home, at the end; the returned report is the same on every rank: [loss sum, target tokens]
    of the whole batch. A ``forward_step_func`` given replaces that of every strategy's runner, as ``adapt`` makes it.
    """

    def __init__(
        self,
        loop: BucketLoop,
        home: StrategyModules,
        finalize: Callable[..., None] | None = None,
        adapt: Callable[[Callable], Callable] | None = None,
    ) -> None:
        self.loop = loop
        self.home = home
        self._finalize = finalize
        self._adapt = functools.lru_cache(maxsize=1)(adapt) if adapt else (lambda forward_step: forward_step)
        self.last_result: BatchResult | None = None
        self.last_step: int | None = None
        self.is_checked = False  # the next batch's switches and flushes, for silent damage
        self._home_layout: ShardLayout | None = None

    def __call__(
        self,
        *,
        data_iterator: Iterator[GlobalBatch] | Sequence[Iterator[GlobalBatch]],
        forward_only: bool = False,
        forward_step_func: Callable | None = None,
        force_all_reduce: bool = False,
        **unused: Any,
    ) -> list[dict[str, torch.Tensor]]:
        _refuse_unknown(unused)
        if forward_step_func is not None:
            for runner in self.loop.runners:
                runner.forward_step = self._adapt(forward_step_func)
        batch = next(data_iterator[0] if isinstance(data_iterator, Sequence) else data_iterator)
        self.last_step = batch.step
        with self.home.state.active():
            overlap.gather_parameters(self.home.chunks)
        self._share_loss_scale()
        with self._checks(batch.step) if self.is_checked and not forward_only else contextlib.nullcontext():
            result = self.loop.run(batch, forward_only=forward_only)
        if not forward_only:
            set_activity(f"step {batch.step}, reduce gradients at home")
            with self.loop.recorder.span("optimizer", step=batch.step, part="reduce"):
                self._finish_gradients(result.num_target_tokens, {"force_all_reduce": True} if force_all_reduce else {})
        self.last_result = result
        report = torch.tensor(
            [result.loss_sum, result.num_target_tokens], dtype=torch.float32, device=torch.cuda.current_device()
        )
        return [{LOSS_KEY: report}]

    def check_copies(self, when: str) -> None:
        """Raises SilentDamage, on every rank, where copies of home's parameters differ in any bit; collective."""
        with self.home.state.active():
            overlap.gather_parameters(self.home.chunks)
        parameters = {name: p.data for name, p in self.home.parameters.items()}
        fingerprints(self._layout_of_home(), dist.get_rank(), parameters, when=when)

    def _layout_of_home(self) -> ShardLayout:
        if self._home_layout is None:
            self._home_layout = self.home.read_layout()
        return self._home_layout

    def _checks(self, step: int) -> contextlib.AbstractContextManager[None]:
        return checked_switches(self.loop, self.home, self._layout_of_home(), step=step)

    def _share_loss_scale(self) -> None:
        # Megatron's loop sets it on home's configuration alone, when training begins.
        for runner in self.loop.runners:
            runner.modules.config.grad_scale_func = self.home.config.grad_scale_func

    def _finish_gradients(self, num_target_tokens: int, options: dict[str, bool]) -> None:
        # Megatron sums the count over data parallel: the global one goes in once.
        finalize = self._finalize or self.home.config.finalize_model_grads_func
        count = num_target_tokens if self.home.coordinate.dp == 0 else 0
        chunks = list(self.home.chunks)
        with self.home.state.active():
            overlap.start_missing_reductions(chunks)
            finalize(chunks, torch.tensor(count, dtype=torch.int, device=torch.cuda.current_device()), **options)


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _UNUSED and value:
            raise ValueError(
                f"hot switching does not know what to do with the schedule's {name}={value!r}: turn off "
                "what asks for it, or train without --hotspa-pool"
            )
