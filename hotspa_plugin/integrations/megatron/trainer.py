"""Training one model under a pool of strategies with Megatron's own optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from hotspa_plugin.data.global_batch import GlobalBatch
from hotspa_plugin.integrations.megatron import home as home_modules
from hotspa_plugin.integrations.megatron.gpt import GPTSpec, build_gpt, freeze_parameters
from hotspa_plugin.integrations.megatron.home import OptimizerSettings
from hotspa_plugin.integrations.megatron.schedule import HotSwitchSchedule
from hotspa_plugin.integrations.megatron.session import ParallelStates, SwitchOptions, build_bucket_loop
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.bucket_loop import BatchAssigner, BatchResult
from hotspa_plugin.runtime.global_view import gather_global, load_global
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.strategy import StrategyPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. ``grad_norm`` is taken before clipping; ``skipped`` where it was not finite."""

    batch: BatchResult
    grad_norm: float
    learning_rate: float
    skipped: bool


class Trainer:
    """A model, its optimizer at home, and the schedule that runs every bucket of a batch.

    Built by every rank of the world together. ``pool`` must have been checked against the world size;
    ``freeze(name)`` tells which parameters are not trained, named as in a model that is not split.
    ``micro_batch_tokens`` caps the micro-batches of strategies (default: their bounds); ``assigner`` divides batches
    over the pool in place of its bounds.
    """

    def __init__(
        self,
        spec: GPTSpec,
        pool: StrategyPool,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer: OptimizerSettings = OptimizerSettings(),
        packing: str = "packed",
        seed: int = 1234,
        switch: SwitchOptions = SwitchOptions(),
        freeze: Callable[[str], bool] | None = None,
        recorder: RunRecorder | NullRecorder | None = None,
        micro_batch_tokens: Mapping[str, int] | None = None,
        assigner: BatchAssigner | None = None,
    ) -> None:
        self.pool, self.rank = pool, dist.get_rank()
        self.recorder = recorder or NullRecorder()
        self._settings = optimizer
        states = ParallelStates(pool, rank=self.rank, world_size=dist.get_world_size(), overlap=switch.overlap)
        self.states = states

        def build_model(strategy, initialize):
            chunks = build_gpt(spec, strategy, dtype, initialize=initialize)
            if freeze:
                for chunk in chunks:
                    freeze_parameters(chunk, freeze)
            return chunks

        home_index = pool.home_index
        with states.home.active():
            torch.manual_seed(seed)  # so that replicas start alike; stages and shards differ by what they hold
            bare = build_model(pool.strategies[home_index], True)
            wrapped = home_modules.wrap(bare, optimizer)
            for chunk in wrapped:
                chunk.broadcast_params()
            self.optimizer, self.scheduler = home_modules.build_optimizer(wrapped, optimizer, dtype)
        self.home = states.modules(home_index, wrapped, bare)
        self.loop = build_bucket_loop(
            states, self.home, build_model,
            seed=seed, packing=packing, switch=switch, recorder=self.recorder,
            device=torch.device(torch.cuda.current_device()), micro_batch_tokens=micro_batch_tokens,
        )  # fmt: skip
        self.loop.assigner = assigner
        self.schedule = HotSwitchSchedule(self.loop, self.home, finalize=finalize_model_grads)
        self.home_layout = self.home.read_layout()

    def record_to(self, recorder: RunRecorder | NullRecorder) -> None:
        """From now on spans go to ``recorder``."""
        self.recorder = self.loop.recorder = recorder

    def accumulate(self, batch: GlobalBatch) -> BatchResult:
        """Zeroes gradients, runs every bucket and finishes home's gradients (reduced, divided by the target count)."""
        for chunk in self.home.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.schedule(data_iterator=iter([batch]))
        return self.schedule.last_result

    def update(self) -> tuple[bool, float, float]:
        """Clips and takes one optimizer step; returns (success, gradient norm, learning rate used)."""
        set_activity(f"step {self.schedule.last_step}, optimizer")
        with self.recorder.span("optimizer", part="step"), self.states.home.active():
            learning_rate = self.optimizer.param_groups[0]["lr"]
            success, grad_norm, _ = self.optimizer.step()
            if success:
                self.scheduler.step(increment=1)
        return success, float(grad_norm or 0.0), learning_rate

    def train_step(self, batch: GlobalBatch) -> StepResult:
        result = self.accumulate(batch)
        success, grad_norm, learning_rate = self.update()
        return StepResult(batch=result, grad_norm=grad_norm, learning_rate=learning_rate, skipped=not success)

    def gather_parameters(self) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
        """Home's whole parameters on rank 0, and the names of those whose copies differ; collective."""
        return gather_global(self.home_layout, self.rank, {n: p.data for n, p in self.home.parameters.items()})

    def gather_gradients(self) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
        """Home's whole finished gradients on rank 0, and the names of those whose copies differ; collective."""
        if self._settings.distributed:
            with self.states.home.active():
                home_modules.gather_reduced_gradients(self.home.chunks, self.home.chunks[0].dp_cp_group)
        gradients = {n: p.main_grad for n, p in self.home.parameters.items() if p.requires_grad}
        return gather_global(self.home_layout, self.rank, gradients)

    def load_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets home's parameters, and the optimizer's masters, from whole tensors by name."""
        load_global(self.home_layout, self.rank, values, {n: p.data for n, p in self.home.parameters.items()})
        self.optimizer.reload_model_params()

    def accumulate_static(self, batch: GlobalBatch) -> BatchResult:
        """Like :meth:`accumulate`, but every sequence runs at home: what a static run would do."""
        loop = self.schedule.loop
        self.schedule.loop = loop.only_home()
        try:
            return self.accumulate(batch)
        finally:
            self.schedule.loop = loop

    def check_switches(self) -> list[str]:
        """Switches to every other strategy and compares what arrived, bit for bit, with what home holds.

        Returns the names of tensors that differ, on rank 0; collective.
        """
        home, _ = self.gather_parameters()
        wrong: dict[str, None] = {}
        for runner in self.loop.runners:
            if runner.label == self.home.label:
                continue
            self.loop.switcher.enter(runner.label)
            parameters = {name: p.data for name, p in runner.modules.parameters.items()}
            there, differing = gather_global(self.loop.switcher.layout(runner.label), self.rank, parameters)
            if self.rank == 0:
                names = [n for n in home if not torch.equal(home[n], there[n])]
                wrong.update(dict.fromkeys(f"{name} under {runner.label}" for name in [*names, *differing]))
        self.loop.switcher.release()
        return list(wrong)
