"""``hotspa bench switch --nodes 2``: what policies and overlap gain where crossing nodes is dear."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotspa_plugin.layout import GPTSizes, gpt_layout
from hotspa_plugin.resharding import build_switch_plan, plan_costs
from hotspa_plugin.strategy import ParallelStrategy

COMPARED = ("balanced", "new_greedy")


def measure_policies(
    rank: int, num_ranks: int, sizes: GPTSizes, cases: Sequence[tuple[str, str]], num_rounds: int, ranks_per_node: int
) -> list[dict[str, object]]:
    """What one rank does: one row per case, a pair of strategies such as ``("tp4", "tp1")``; equal on all ranks.

    Both policies move the same parameters and take turns; seconds are medians of the slowest rank's. The predicted
    ratio is that of the bytes that pass the busiest card in its busier direction.
    """
    from hotspa_plugin.integrations.megatron.process import prepare_process

    prepare_process()
    import torch

    from hotspa_plugin.resharding.executor import ReshardExecutor
    from hotspa_plugin.resharding.transports import TorchDistributedTransport
    from hotspa_plugin.resharding.transports.measurement import allocate_tensors, measure_in_turn

    nodes = np.arange(num_ranks) // ranks_per_node
    rows = []
    for names in cases:
        strategies = [ParallelStrategy.parse(name).resolve(num_ranks) for name in names]
        divisor = int(np.lcm(*(strategy.tp for strategy in strategies)))
        before, after = (
            gpt_layout(sizes, tp=s.tp, pp=s.pp, dp=s.dp, sequence_parallel=s.sp, vocab_divisor=divisor)
            for s in strategies
        )
        tensors = [allocate_tensors(layout, rank, torch.device("cpu")) for layout in (before, after)]
        plans = {policy: build_switch_plan(before, after, policy=policy, node_of_rank=nodes) for policy in COMPARED}
        seconds = measure_in_turn(
            {
                policy: ReshardExecutor(plan, rank, TorchDistributedTransport(), *tensors).run
                for policy, plan in plans.items()
            },
            num_rounds=num_rounds,
        )
        costs = {policy: plan_costs(plan) for policy, plan in plans.items()}
        ours, other = COMPARED
        rows.append(
            {
                "case": " to ".join(names),
                "num_ranks": num_ranks,
                "parameter_bytes": sum(
                    int(np.prod(tensor.shape, dtype=np.int64)) * tensor.item_size_bytes for tensor in before.tensors
                ),
                **{f"{policy}_s": seconds[policy] for policy in COMPARED},
                **{f"{policy}_cross_node_bytes": int(costs[policy].cross_node_bytes) for policy in COMPARED},
                "predicted_ratio": costs[other].max_card_bytes / costs[ours].max_card_bytes,
                "measured_ratio": seconds[other] / seconds[ours],
                "num_rounds_measured": num_rounds,
            }
        )
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """A pool whose short buckets flush over the link while longer ones compute."""

    pool: str = "tp1:128 tp2:256 tp2pp2:512"
    lengths: tuple[int, ...] = (128,) * 8 + (256,) * 4 + (512,) * 8
    hidden_size: int = 256
    num_layers: int = 6
    ranks_per_node: int = 2
    num_steps: int = 6  # the first one warms up and is not counted


def measure_overlap(rank: int, num_ranks: int, case: OverlapCase, folder: str) -> dict[str, list[dict[str, float]]]:
    """What one rank does: trains the same batches without and with overlap, in turns; this rank's seconds by step.

    The records of the run with overlap lie in ``folder`` afterwards.
    """
    from hotspa_plugin.integrations.megatron.process import prepare_process

    prepare_process()
    import torch.distributed as dist

    from hotspa_plugin.config import ModelConfig
    from hotspa_plugin.data import GlobalBatchSampler, RandomTokenSource
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec
    from hotspa_plugin.integrations.megatron.session import SwitchOptions
    from hotspa_plugin.integrations.megatron.train_loop import TrainLoop
    from hotspa_plugin.integrations.megatron.trainer import Trainer
    from hotspa_plugin.runtime.mover import OVERLAPS
    from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
    from hotspa_plugin.runtime.run_record import ModelInfo, PoolEntry, RunInfo
    from hotspa_plugin.strategy import StrategyPool

    changes = {"hidden_size": case.hidden_size, "num_layers": case.num_layers, "vocab_size": 256}
    model = ModelConfig.model_validate({"preset": "tiny-llama", **changes})
    spec = GPTSpec.from_config(model, padded_vocab_size=256, max_positions=max(case.lengths))
    pool = StrategyPool.parse(case.pool).check(world_size=num_ranks, model=spec.shape)
    source = RandomTokenSource(case.lengths, vocab_size=256, seed=1)
    loops, records = {}, {}
    for overlap in ("none", "both"):
        trainer = Trainer(
            spec,
            pool,
            switch=SwitchOptions(node_of_rank=np.arange(num_ranks) // case.ranks_per_node, overlap=OVERLAPS[overlap]),
            recorder=NullRecorder(),
        )
        info = RunInfo(
            world_size=num_ranks,
            pool=tuple(PoolEntry(strategy=str(e.strategy), bound_tokens=e.bound_tokens) for e in pool.entries),
            home=str(pool.home),
            model=ModelInfo(name=model.name),
        )
        trainer.record_to(RunRecorder(Path(folder) / overlap, rank, num_ranks, info=info if rank == 0 else None))
        loops[overlap] = TrainLoop(
            trainer=trainer, source=source, num_steps=0, save_every=0, folder=None,
            sampler=GlobalBatchSampler(source.lengths, num_sequences=len(case.lengths), seed=1, shuffle=False),
        )  # fmt: skip
        records[overlap] = []
    for step in range(case.num_steps):
        for overlap, loop in loops.items():
            dist.barrier()
            loop.first_step, loop.num_steps = step, step + 1
            records[overlap] += loop.run()
    for loop in loops.values():
        dist.barrier()
        loop.trainer.recorder.close()
    return {
        overlap: [
            {
                "step_s": record.seconds.total,
                **{
                    name: sum(getattr(bucket, name) for bucket in record.buckets)
                    for name in ("switch_s", "flush_s", "switch_hidden_s", "flush_hidden_s", "compute_s")
                },
            }
            for record in steps[1:]
        ]
        for overlap, steps in records.items()
    }


def summarize_overlap(ranks: Sequence[dict[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """One row without and one with overlap: medians over steps of the mean over ranks, and the shares hidden."""
    rows = []
    for overlap in ranks[0]:
        steps = list(zip(*(rank[overlap] for rank in ranks), strict=True))
        row: dict[str, Any] = {"overlap": overlap}
        for name in steps[0][0]:
            row[name] = statistics.median(statistics.mean(rank[name] for rank in step) for step in steps)
        for what in ("switch", "flush"):
            hidden, exposed = row[f"{what}_hidden_s"], row[f"{what}_s"]
            row[f"{what}_hidden_share"] = hidden / (hidden + exposed) if hidden + exposed else 0.0
        rows.append(row)
    return rows
