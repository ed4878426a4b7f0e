"""Home: the strategy whose modules are wrapped for training and whose optimizer owns the master weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with warm-up and decay. ``distributed`` shards optimizer state over data parallel."""

    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 1000
    decay_style: str = "cosine"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = False


def wrap(chunks: Sequence[MegatronModule], settings: OptimizerSettings) -> list[DistributedDataParallel]:
    """Home's chunks in Megatron's DDP, with fp32 gradient buffers."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,
    )
    return [
        # DDP changes its configuration, so each chunk gets a copy.
        DistributedDataParallel(config=chunk.config, ddp_config=dataclasses.replace(config), module=chunk)
        for chunk in chunks
    ]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings, dtype: torch.dtype
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron's optimizer and learning-rate schedule for home's chunks; home's groups must be in place."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=settings.distributed,
        bf16=dtype is torch.bfloat16,
        fp16=False,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_steps else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(settings.decay_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.decay_steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def gather_reduced_gradients(chunks: Sequence[DistributedDataParallel], group: torch.distributed.ProcessGroup) -> None:
    """After a reduce-scatter, completes every gradient buffer over data parallel ``group``, in place.

    The distributed optimizer leaves each rank only its own shard; checks need the whole.
    """
    size = group.size()
    for chunk in chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(size))
                gathered = [torch.empty_like(shard) for shard in shards]
                torch.distributed.all_gather(gathered, shards[group.rank()].clone(), group=group)
                bucket.grad_data.copy_(torch.cat(gathered))
