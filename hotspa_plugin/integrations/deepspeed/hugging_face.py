"""Hugging Face causal language models under several strategies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hotspa_plugin.data.micro_batch import PackedMicroBatch
from hotspa_plugin.integrations.deepspeed import attention, layout_reader
from hotspa_plugin.integrations.deepspeed.tensor_parallel import TensorParallelPlan, one_axis_mesh
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.process_groups.registry import ProcessGroupRegistry
from hotspa_plugin.runtime.bucket_loop import MicroBatch
from hotspa_plugin.runtime.layout_gathering import gather_layout
from hotspa_plugin.topology import Coordinate, RankGrid


class StrategyModel:
    """A bare copy of a model under one strategy, whose parameters are given to it as local tensors.

    ``template`` is the whole model, perhaps on the meta device; only its structure, its configuration and which of
    its parameters train are used. Built by every rank of the world together.
    """

    def __init__(
        self,
        template: PreTrainedModel,
        grid: RankGrid,
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        registry: ProcessGroupRegistry,
    ) -> None:
        self.strategy = grid.strategy
        self.label = str(grid.strategy)
        self.coordinate: Coordinate = grid.coordinate(rank)
        self.device = device
        self._dtype = dtype
        self.module = _build_on_meta(template)
        self._trainable = {name: p.requires_grad for name, p in template.named_parameters()}
        # Modules that share a parameter must share it again when it is replaced.
        first_name = {id(p): name for name, p in reversed(list(self.module.named_parameters()))}
        self._owners = {place: first_name[id(p)] for place, p in self.module.named_parameters(remove_duplicate=False)}
        if set(self._owners.values()) != set(self._trainable):
            raise ValueError(
                f"model {type(template).__name__} built from its configuration has other parameters than the "
                "one given: change the configuration, not the built model"
            )
        plan = None
        if self.strategy.tp > 1:
            plan = TensorParallelPlan.of(template)
            mesh = one_axis_mesh(registry.get(grid.group_of("tp", rank)), device)
            plan.apply(self.module, mesh)
        places = dict(self.module.named_parameters(remove_duplicate=False))
        self._placed = {}
        for place, name in self._owners.items():
            if _placement(places[place]) != _placement(self._placed.setdefault(name, places[place])):
                raise ValueError(
                    f"parameters {place} and {name} are one, but the tensor-parallel plan cuts them differently"
                )
        self.layout: ShardLayout = gather_layout(
            self.label,
            layout_reader.read_rank(
                self._placed,
                tp_rank=self.coordinate.tp,
                dtype=dtype,
                trainable=self._trainable,
                is_partial=plan.is_partial if plan else lambda name: False,
            ),
            self.coordinate.dp,
        )
        self.module.train()
        if self.strategy.recompute == "full":
            self.module.gradient_checkpointing_enable({"use_reentrant": False})

    def stand_ins(self) -> dict[str, torch.nn.Parameter]:
        """A parameter of the right local shape and dtype for each of this model's own, holding no memory."""
        one = torch.zeros((), dtype=self._dtype, device=self.device)
        return {
            name: torch.nn.Parameter(one.expand(_local_shape(p)), requires_grad=self._trainable[name])
            for name, p in self._placed.items()
        }

    def take_buffers(self, template: PreTrainedModel) -> None:
        """Copies ``template``'s buffers, such as rotary frequencies, which all strategies hold whole."""
        for name, buffer in template.named_buffers():
            path, _, leaf = name.rpartition(".")
            copied = buffer.detach().to(self.device, copy=True)
            self.module.get_submodule(path).register_buffer(leaf, copied, persistent=False)

    def bind(self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Makes the model compute with ``parameters`` and add its gradients into ``gradients``, both local tensors."""
        fresh = {}
        for name, placed in self._placed.items():
            local = parameters[name]
            if isinstance(placed, DTensor):
                local = DTensor.from_local(
                    local, placed.device_mesh, placed.placements, run_check=False,
                    shape=placed.shape, stride=placed.stride(),
                )  # fmt: skip
            fresh[name] = torch.nn.Parameter(local, requires_grad=self._trainable[name])
            if self._trainable[name]:
                _accumulate_into(fresh[name], gradients[name])
        for place, name in self._owners.items():
            path, _, leaf = place.rpartition(".")
            self.module.get_submodule(path).register_parameter(leaf, fresh[name])


class HuggingFaceRunner:
    """A ``BucketRunner`` over one :class:`StrategyModel`."""

    def __init__(self, model: StrategyModel, *, seed: int) -> None:
        self.model = model
        self.label = model.label
        self.dp_rank = model.coordinate.dp
        self._seed = seed

    def run(
        self, step: int, bucket: int, micro_batches: Sequence[MicroBatch], *, forward_only: bool = False
    ) -> torch.Tensor:
        total = torch.zeros(2, dtype=torch.float64)
        device = self.model.device
        self.model.module.train(not forward_only)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for index, micro_batch in enumerate(micro_batches):
                place = (self._seed, step, bucket, index, self.dp_rank)
                # Dropout then depends on nothing that ran before, and tensor-parallel peers start alike.
                torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1))
                with torch.set_grad_enabled(not forward_only):
                    loss_sum = self._loss_sum(micro_batch)
                if not forward_only:
                    loss_sum.backward()
                total += torch.tensor([loss_sum.item(), micro_batch.loss_mask.sum().item()], dtype=torch.float64)
        # Tensor-parallel peers hold the same loss; it counts once.
        return total if self.model.coordinate.tp == 0 else torch.zeros_like(total)

    def _loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        device = self.model.device
        segments = None
        if isinstance(micro_batch, PackedMicroBatch):
            segments = torch.diff(micro_batch.cu_seqlens).tolist()
        logits = self.model.module(
            input_ids=micro_batch.tokens.to(device),
            position_ids=micro_batch.position_ids.to(device),
            use_cache=False,
            segment_lengths=segments,
            tp_rank=self.model.coordinate.tp,
        ).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), micro_batch.labels.to(device).flatten(), reduction="none"
        )
        return (losses * micro_batch.loss_mask.to(device).flatten()).sum()


def broadcast_whole(model: PreTrainedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """``model``'s parameters by name as rank 0 holds them, on every rank where they lay; a shared one appears once."""
    values = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"parameter {name} is partitioned by deepspeed.zero.Init: build the model outside of it")
        # One at a time through the device, which collectives may need.
        on_device = parameter.detach().to(device, copy=True)
        dist.broadcast(on_device, src=0)
        values[name] = on_device.to(parameter.device)
    return values


def _build_on_meta(template: PreTrainedModel) -> PreTrainedModel:
    attention.register()
    config = copy.deepcopy(template.config)
    config.use_cache = False
    with torch.device("meta"):
        return type(template)._from_config(config, attn_implementation=attention.NAME)


def _placement(parameter: torch.Tensor) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _local_shape(parameter: torch.Tensor) -> torch.Size:
    return parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape


def _accumulate_into(parameter: torch.nn.Parameter, accumulator: torch.Tensor) -> None:
    """Makes every backward pass add ``parameter``'s gradient into ``accumulator``, in its dtype."""

    def accumulate(parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            # Some backward operators leave another placement of the same gradient (embeddings: whole on every rank).
            gradient = gradient.redistribute(placements=parameter.placements).to_local()
        accumulator.add_(gradient)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
