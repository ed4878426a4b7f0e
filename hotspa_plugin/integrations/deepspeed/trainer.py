"""Megatron-core models trained by DeepSpeed's engine, behind the methods of Megatron's ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hotspa_plugin.config import TrainingConfig
from hotspa_plugin.data.global_batch import GlobalBatch
from hotspa_plugin.integrations.deepspeed.initialize import initialize
from hotspa_plugin.integrations.megatron.gpt import GPTSpec, build_gpt
from hotspa_plugin.integrations.megatron.trainer import StepResult
from hotspa_plugin.integrations.megatron.training_plan import TrainingPlan
from hotspa_plugin.integrations.megatron.training_run import DTYPES
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder


class DeepSpeedTrainer:
    """What ``hotspa train`` and ``hotspa demo`` need of a trainer, over a ``HotSwitchEngine``.

    ZeRO's stage is 1, so that a gradient norm is known, as DeepSpeed tells none at stage 0.
    """

    def __init__(self, plan: TrainingPlan, recorder: RunRecorder | NullRecorder) -> None:
        config = plan.config
        self.rank, self.recorder, self.pool = dist.get_rank(), recorder, plan.pool
        spec = GPTSpec.from_config(
            config.model, padded_vocab_size=plan.padded_vocab_size, max_positions=plan.pool.bounds_tokens[-1]
        )
        dtype = DTYPES[config.run.dtype]
        self.engine, *_ = initialize(
            model=lambda strategy, first: build_gpt(spec, strategy, dtype, initialize=first),
            optimizer=lambda parameters: _adamw(parameters, config),
            lr_scheduler=lambda optimizer: _scheduler(optimizer, config),
            config=engine_settings(plan, dist.get_world_size()),
            recorder=recorder,
        )

    def record_to(self, recorder: RunRecorder | NullRecorder) -> None:
        """From now on spans go to ``recorder``."""
        self.recorder = self.engine.loop.recorder = recorder

    def train_step(self, batch: GlobalBatch) -> StepResult:
        learning_rate = self.engine.get_lr()[0]
        self.engine(batch)
        self.engine.step(lr_kwargs={"increment": 1})
        return StepResult(
            batch=self.engine.last_result,
            grad_norm=float(self.engine.get_global_grad_norm()),
            learning_rate=learning_rate,
            skipped=False,
        )

    def gather_parameters(self) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
        return self.engine.gather_parameters()

    def load_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        self.engine.load_parameters(values)


def engine_settings(plan: TrainingPlan, world_size: int) -> dict:
    """The DeepSpeed configuration that says what ``plan`` says."""
    config = plan.config
    return {
        # Only DeepSpeed's own counts use it: a batch has as many sequences as the sampler draws.
        "train_batch_size": world_size,
        "gradient_clipping": config.optimizer.clip_grad,
        "bf16": {"enabled": config.run.dtype == "bf16"},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "hotspa": {
            "pool": str(plan.pool),
            "home": str(plan.pool.home),
            "packing": config.data.packing,
            "seed": config.run.seed,
            "switch": {"policy": config.run.switch_policy, "memory_mb": float(config.run.switch_memory_mb)},
        },
    }


def _adamw(parameters: list[torch.nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    optimizer = config.optimizer
    # Norms and biases do not decay, as with Megatron; its scheduler multiplies the decay by wd_mult.
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "wd_mult": 1.0},
        {"params": [p for p in parameters if p.dim() <= 1], "wd_mult": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )  # fmt: skip


def _scheduler(optimizer: torch.optim.Optimizer, config: TrainingConfig) -> OptimizerParamScheduler:
    settings, decay_steps = config.optimizer, config.optimizer.decay_steps or config.run.steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_steps else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
