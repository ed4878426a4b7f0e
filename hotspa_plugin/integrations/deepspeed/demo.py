"""``hotspa demo --engine deepspeed``: the same demonstration, each run trained by DeepSpeed's engine."""

from __future__ import annotations

from hotspa_plugin.config import TrainingConfig
from hotspa_plugin.integrations.megatron import demo as megatron_demo
from hotspa_plugin.integrations.megatron import process as megatron_process
from hotspa_plugin.runtime.run_record import Comparison, StepRecord


def run_demo(
    config: TrainingConfig, *, num_ranks: int, include_all_static: bool = False, command: str = ""
) -> Comparison:
    """Trains ``config`` hot, then static; prints tables; leaves records and ``comparison.json`` in ``run.out``.

    Raises ValueError for what does not fit, before any process is started.
    """
    return megatron_demo.run_demo(
        config, num_ranks=num_ranks, include_all_static=include_all_static, command=command, on_ranks=__name__
    )


def run_hot(config: TrainingConfig, command: str) -> list[StepRecord]:
    """On each rank: the hot run."""
    return megatron_demo.run_hot(config, command, build=_trainer_builder())


def run_static(config: TrainingConfig, hot_out: str) -> list[StepRecord]:
    """On each rank: the same batches from the same parameters under one strategy."""
    return megatron_demo.run_static(config, hot_out, build=_trainer_builder())


def _trainer_builder():
    from hotspa_plugin.integrations.deepspeed.process import prepare_process

    prepare_process()
    # Megatron's import needs the CUDA calls redirected where there is no CUDA.
    megatron_process.prepare_process()
    from hotspa_plugin.integrations.deepspeed.trainer import DeepSpeedTrainer

    return DeepSpeedTrainer
