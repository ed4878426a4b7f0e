"""What ``hotspa train`` and ``hotspa demo`` say before they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotspa_plugin.report.format import format_bytes, format_count

if TYPE_CHECKING:
    from hotspa_plugin.integrations.megatron.training_plan import TrainingPlan


def plan_summary(plan: TrainingPlan, *, num_ranks: int, first_step: int = 0) -> list[str]:
    """Lines on the pool, the data, a rank's memory before activations, and where a resumed run goes on."""
    config, data = plan.config, plan.config.data
    memory = ", ".join(f"{entry.strategy} {format_bytes(entry.total_bytes)}" for entry in plan.memory)
    lines = [
        f"{num_ranks} ranks, {config.model.name} ({format_count(plan.num_parameters)} parameters), "
        f"pool {plan.pool}, home {plan.pool.home}",
        f"{len(plan.source.lengths):,} sequences from {data.path or data.source}; {plan.source.counts}",
        f"memory a rank, before activations: {memory}",
    ]
    if first_step:
        lines.append(f"going on after step {first_step} of {config.run.steps}")
    return lines
