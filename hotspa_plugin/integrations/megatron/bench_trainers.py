"""The trainers that ``hotspa bench train`` lets race, and the memory that they hold."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.config import TrainingConfig
from hotspa_plugin.cost.resident import num_parameters
from hotspa_plugin.integrations.megatron.gpt import GPTSpec
from hotspa_plugin.integrations.megatron.home import OptimizerSettings
from hotspa_plugin.integrations.megatron.session import SwitchOptions
from hotspa_plugin.integrations.megatron.trainer import Trainer
from hotspa_plugin.integrations.megatron.training_plan import TrainingPlan
from hotspa_plugin.runtime.stopwatch import Stopwatch

if TYPE_CHECKING:
    from hotspa_plugin.integrations.megatron.bench_train import Contender, Setup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def megatron_trainer(setup: Setup, contender: Contender, stopwatch: Stopwatch) -> Trainer:
    """Megatron's optimizer at home, as ``hotspa train`` builds it."""
    spec = GPTSpec.from_config(setup.model, padded_vocab_size=setup.sizes.vocab_size, max_positions=setup.max_positions)
    return Trainer(
        spec,
        contender.pool.check(world_size=dist.get_world_size(), model=spec.shape),
        dtype=DTYPES[setup.sizes.dtype],
        optimizer=OptimizerSettings(),
        packing=contender.packing,
        seed=setup.seed,
        switch=SwitchOptions(node_of_rank=setup.node_of_rank),
        recorder=stopwatch,
        assigner=contender.assigner,
    )


def deepspeed_trainer(setup: Setup, contender: Contender, stopwatch: Stopwatch) -> Any:
    """The same model and optimizer under DeepSpeed's engine with ZeRO 1."""
    from hotspa_plugin.integrations.deepspeed.process import prepare_process as prepare_deepspeed

    if cpu.is_enabled():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the redirected calls would look like CUDA to DeepSpeed
    prepare_deepspeed()
    from hotspa_plugin.integrations.deepspeed.trainer import DeepSpeedTrainer

    own = OptimizerSettings()
    optimizer = {name: getattr(own, name) for name in ("lr", "min_lr", "warmup_steps", "decay_steps", "decay_style",
                                                       "weight_decay", "eps", "clip_grad")}  # fmt: skip
    config = TrainingConfig.model_validate(
        {
            "pool": str(contender.pool),
            "optimizer": {**optimizer, "betas": (own.beta1, own.beta2)},
            "run": {"seed": setup.seed, "dtype": {"float32": "fp32", "bfloat16": "bf16"}[setup.sizes.dtype]},
        }
    )
    plan = TrainingPlan(
        config=config.model_copy(update={"model": setup.model}),
        pool=contender.pool.check(world_size=dist.get_world_size()),
        source=None,  # batches are handed over
        padded_vocab_size=setup.sizes.vocab_size,
        num_parameters=num_parameters(setup.sizes.gpt_sizes()),
        memory=(),
        overlap="none",
    )
    trainer = DeepSpeedTrainer(plan, stopwatch)
    trainer.engine.loop.assigner = contender.assigner
    return trainer


def held_bytes_of(trainer: Any) -> int:
    """Bytes of home's parameters, gradients and optimizer state, each storage once."""
    tensors = []
    if hasattr(trainer, "engine"):
        weights, wrapped = trainer.engine.weights, trainer.engine.deepspeed_engine
        tensors += [*weights.parameters.values(), *weights.gradients.values()]
        tensors += [parameter.data for parameter in wrapped.module.parameters()]
        optimizers = [wrapped.optimizer]
    else:
        for parameter in trainer.home.parameters.values():
            tensors += [parameter.data, getattr(parameter, "main_grad", None)]
        optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for optimizer in optimizers:
        for group in optimizer.optimizer.param_groups:
            tensors += group["params"]
        for state in optimizer.optimizer.state.values():
            tensors += state.values()
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
