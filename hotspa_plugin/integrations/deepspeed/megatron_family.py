"""Megatron-core models under DeepSpeed's engine, built by the user's builder once per strategy."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from hotspa_plugin.integrations.deepspeed.config_block import HotspaBlock
from hotspa_plugin.integrations.deepspeed.home import HomeWeights
from hotspa_plugin.integrations.megatron.session import ParallelStates, SwitchOptions, build_bucket_loop
from hotspa_plugin.integrations.megatron.strategy_modules import attach_gradient
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.runtime.bucket_loop import BucketLoop
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool

ModelBuilder = Callable[[ParallelStrategy, bool], list[MegatronModule]]


class MegatronFamily:
    """A ``ModelFamily`` over ``build(strategy, initialize)``, which returns this rank's model chunks.

    It is called once per strategy, while Megatron's parallel state is that strategy's. With ``initialize`` True
    (home) the parameters must have their first values, else they may hold anything.
    """

    template = None

    def __init__(
        self, build: ModelBuilder, pool: StrategyPool, block: HotspaBlock, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._build, self._block, self._device = build, block, device
        self.pool = pool
        self._states = ParallelStates(self.pool, rank=dist.get_rank(), world_size=dist.get_world_size())
        self.registry = self._states.registry
        self.home_grid = self._states.grids[self.pool.home_index]
        torch.manual_seed(block.seed)  # so that replicas start alike
        with self._states.home.active():
            chunks = build(self.pool.home, True)
        if not isinstance(chunks, list) or not all(isinstance(chunk, MegatronModule) for chunk in chunks):
            raise ValueError(
                f"model: the builder returned {type(chunks).__name__}, but must return a list of Megatron-core "
                "modules, this rank's model chunks"
            )
        for chunk in chunks:
            chunk.train()
            wrong = [name for name, p in chunk.named_parameters() if p.dtype is not dtype]
            if wrong:
                raise ValueError(
                    f"model: the builder makes parameter {wrong[0]} in another dtype than the configuration asks for "
                    f"({dtype}): set params_dtype, or the bf16 block"
                )
        self._home = self._states.modules(self.pool.home_index, chunks, chunks)
        self.home_layout = self._home.read_layout()
        self.trainable = {name: p.requires_grad for name, p in self._home.parameters.items()}
        self._loop: BucketLoop | None = None
        self.vocab_size = getattr(chunks[0], "vocab_size", None)

    def layouts(self) -> dict[str, ShardLayout]:
        found = {str(self.pool.home): self.home_layout}
        if self._loop is not None:
            others = [label for label in map(str, self.pool.strategies) if label not in found]
            found.update((label, self._loop.switcher.layout(label)) for label in others)
        return found

    def home_values(self) -> dict[str, torch.Tensor]:
        return {
            name: p.detach().to(device=self._device, dtype=torch.float32, copy=True)
            for name, p in self._home.parameters.items()
        }

    def user_parameters(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._home.parameters.items()}

    def build_loop(self, weights: HomeWeights, *, recorder: RunRecorder | NullRecorder) -> BucketLoop:
        for name, parameter in self._home.parameters.items():
            parameter.data = weights.parameters[name]
            if parameter.requires_grad:
                attach_gradient(parameter, weights.gradients[name])
        self._loop = build_bucket_loop(
            self._states,
            self._home,
            self._build,
            seed=self._block.seed,
            packing=self._block.packing,
            switch=SwitchOptions(
                policy=self._block.switch.policy, memory_budget_bytes=self._block.switch.memory_budget_bytes
            ),
            micro_batch_tokens=self._block.micro_batch_tokens,
            recorder=recorder,
            device=self._device,
        )
        return self._loop

    def parameters(self, label: str) -> dict[str, torch.Tensor]:
        (runner,) = (runner for runner in self._loop.runners if runner.label == label)
        return {name: parameter.data for name, parameter in runner.modules.parameters.items()}
