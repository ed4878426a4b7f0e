"""The two kinds of models that can be switched, behind one interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hotspa_plugin.integrations.deepspeed import hugging_face
from hotspa_plugin.integrations.deepspeed.config_block import HotspaBlock
from hotspa_plugin.integrations.deepspeed.home import HomeWeights
from hotspa_plugin.integrations.deepspeed.hugging_face import HuggingFaceRunner, StrategyModel
from hotspa_plugin.integrations.deepspeed.model_checks import check_family, check_model, check_strategy
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.process_groups import plan_groups
from hotspa_plugin.process_groups.registry import ProcessGroupRegistry, process_registry
from hotspa_plugin.resharding.transports import TorchDistributedTransport
from hotspa_plugin.runtime.bucket_loop import BucketLoop, bucket_specs
from hotspa_plugin.runtime.global_view import load_global
from hotspa_plugin.runtime.hot_switcher import HomeTensors, HotSwitcher, StrategyTensors
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.strategy import StrategyPool
from hotspa_plugin.topology import RankGrid


class ModelFamily(Protocol):
    """A model under every strategy of a checked pool, before and after DeepSpeed has taken home's parameters."""

    pool: StrategyPool
    registry: ProcessGroupRegistry
    home_grid: RankGrid
    home_layout: ShardLayout
    trainable: Mapping[str, bool]  # by home's local parameter name
    vocab_size: int | None
    template: PreTrainedModel | None

    def layouts(self) -> dict[str, ShardLayout]:
        """By strategy, those that are known so far: home's, and in the end all."""
        ...

    def home_values(self) -> dict[str, torch.Tensor]:
        """Home's initial parameters on this rank, fp32, of their own storage."""
        ...

    def user_parameters(self) -> dict[int, str]:
        """Home's local parameter name by ``id`` of each of the user's own parameters."""
        ...

    def build_loop(self, weights: HomeWeights, *, recorder: RunRecorder | NullRecorder) -> BucketLoop:
        """Binds home's modules to ``weights`` and builds the rest. Collective over the world."""
        ...

    def parameters(self, label: str) -> dict[str, torch.Tensor]:
        """This rank's tensors under the strategy called ``label``, by local parameter name; alive while it runs."""
        ...


def open_family(
    model: Any, pool: StrategyPool, block: HotspaBlock, *, dtype: torch.dtype, device: torch.device
) -> ModelFamily:
    """The family that ``model`` belongs to. Raises ValueError for a model of neither kind."""
    if isinstance(model, (PreTrainedModel, PretrainedConfig)):
        return HuggingFaceFamily(model, pool, block, dtype=dtype, device=device)
    if callable(model) and not isinstance(model, (torch.nn.Module, type)):
        from hotspa_plugin.integrations.deepspeed.megatron_family import MegatronFamily

        return MegatronFamily(model, pool, block, dtype=dtype, device=device)
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    raise ValueError(
        f"model: {name} can be trained by DeepSpeed, but not switched: pass a Hugging Face causal language model (or "
        "its configuration), or a builder of Megatron-core models, build(strategy, initialize)"
    )


class HuggingFaceFamily:
    """A Hugging Face causal language model; every rank passes it, and rank 0's weights are taken.

    A configuration becomes a model, initialised from the current seed, only when its weights are asked for.
    """

    def __init__(
        self,
        given: PreTrainedModel | PretrainedConfig,
        pool: StrategyPool,
        block: HotspaBlock,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rank, world_size = dist.get_rank(), dist.get_world_size()
        self._block, self._device = block, device
        self.pool, self._given = pool, given
        model = given
        if isinstance(given, PretrainedConfig):
            if type(given) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise ValueError(f"model: {type(given).__name__} describes no causal language model of transformers")
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(given)
        check_model(model)
        for strategy in self.pool.strategies:
            check_strategy(model, strategy)
        check_family(model)
        self.template = model
        self.vocab_size = model.config.vocab_size
        self.trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            if parameter.dtype not in (torch.float32, dtype):
                raise ValueError(
                    f"model: parameter {name} is {parameter.dtype}, the configuration asks for {dtype}: load the "
                    "model in float32, or enable bf16"
                )
        self.registry = process_registry()
        self.registry.reopen()
        grids = [RankGrid(strategy=strategy, world_size=world_size) for strategy in self.pool.strategies]
        self.registry.create_all(plan_groups(grids))
        self.registry.warm_up()
        self.registry.seal()
        self._models = [
            StrategyModel(model, grid, rank=self._rank, dtype=dtype, device=device, registry=self.registry)
            for grid in grids
        ]
        self.home_grid = grids[self.pool.home_index]
        self._home = self._models[self.pool.home_index]
        self.home_layout = self._home.layout

    def layouts(self) -> dict[str, ShardLayout]:
        return {model.label: model.layout for model in self._models}

    def home_values(self) -> dict[str, torch.Tensor]:
        if isinstance(self._given, PretrainedConfig):
            self.template = AutoModelForCausalLM.from_config(self._given)
        for model in self._models:
            model.take_buffers(self.template)
        whole = hugging_face.broadcast_whole(self.template, self._device)
        values = {
            shard.parameter: torch.empty(shard.region.shape, dtype=torch.float32, device=self._device)
            for shard in self.home_layout.shards(self._rank)
        }
        load_global(self.home_layout, self._rank, whole, values)
        # In the model's own order, which parameter groups and checkpoints follow.
        return {name: values[name] for name in self.trainable}

    def user_parameters(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.template.named_parameters()}

    def build_loop(self, weights: HomeWeights, *, recorder: RunRecorder | NullRecorder) -> BucketLoop:
        self._home.bind(weights.parameters, weights.gradients)
        stand_ins = {model.label: model.stand_ins() for model in self._models if model is not self._home}
        self._stand_ins = stand_ins
        gradients: dict[int, torch.Tensor] = {}
        switcher = HotSwitcher(
            rank=self._rank,
            home=HomeTensors(layout=self.home_layout, parameters=weights.parameters, gradients=weights.gradients),
            others={
                model.label: StrategyTensors(
                    layout=model.layout,
                    parameters=stand_ins[model.label],
                    attach_gradient=lambda parameter, accumulator: gradients.update({id(parameter): accumulator}),
                )
                for model in self._models
                if model is not self._home
            },
            transport=TorchDistributedTransport(),
            policy=self._block.switch.policy,
            memory_budget_bytes=self._block.switch.memory_budget_bytes,
            device=self._device,
        )
        for model in self._models:
            if model is not self._home:
                own = stand_ins[model.label]
                model.bind(
                    {name: parameter.data for name, parameter in own.items()},
                    {name: gradients[id(parameter)] for name, parameter in own.items() if parameter.requires_grad},
                )
        # No sequence parallelism here, so lengths need not divide by tp.
        specs = [
            dataclasses.replace(spec, length_multiple=1)
            for spec in bucket_specs(self.pool, micro_batch_tokens=self._block.micro_batch_tokens)
        ]
        return BucketLoop(
            buckets=specs,
            runners=[HuggingFaceRunner(model, seed=self._block.seed) for model in self._models],
            home_index=self.pool.home_index,
            switcher=switcher,
            packing=self._block.packing,
            recorder=recorder,
            device=self._device,
        )

    def parameters(self, label: str) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._stand_ins[label].items()}
