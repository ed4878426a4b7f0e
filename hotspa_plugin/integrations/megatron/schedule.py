"""The hot switch as a schedule: a drop-in for the function that Megatron's training loop calls each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hotspa_plugin.integrations.megatron.runner import LOSS_KEY
from hotspa_plugin.integrations.megatron.strategy_modules import StrategyModules
from hotspa_plugin.runtime.bucket_loop import BatchResult, BucketLoop, GlobalBatch


class HotSwitchSchedule:
    """Has the signature of Megatron's forward-backward function and runs all buckets of a global batch.

    The data iterator yields ``GlobalBatch`` objects. Gradients are finished once, at home, at the end;
    the returned report is the same on every rank: [loss sum, target tokens] of the whole batch.
    """

    def __init__(self, loop: BucketLoop, home: StrategyModules, finalize: Callable[..., None] | None = None) -> None:
        self.loop = loop
        self.home = home
        self._finalize = finalize
        self.last_result: BatchResult | None = None

    def __call__(
        self,
        *,
        data_iterator: Iterator[GlobalBatch],
        forward_only: bool = False,
        **schedule_options: Any,
    ) -> list[dict[str, torch.Tensor]]:
        batch = next(data_iterator)
        result = self.loop.run(batch, forward_only=forward_only)
        if not forward_only:
            with self.loop.recorder.span("optimizer", step=batch.step, part="reduce"):
                self._finish_gradients(result.num_target_tokens)
        self.last_result = result
        report = torch.tensor([result.loss_sum, result.num_target_tokens], dtype=torch.float32)
        return [{LOSS_KEY: report}]

    def _finish_gradients(self, num_target_tokens: int) -> None:
        # Megatron sums the count over data parallel: the global one goes in once.
        finalize = self._finalize or self.home.config.finalize_model_grads_func
        count = num_target_tokens if self.home.coordinate.dp == 0 else 0
        with self.home.state.active():
            finalize(list(self.home.chunks), torch.tensor(count, dtype=torch.int, device=torch.cuda.current_device()))
