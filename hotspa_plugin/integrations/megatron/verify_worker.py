"""What the ranks, and the one-process reference, do for ``hotspa verify``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.config import ModelConfig
from hotspa_plugin.data import RandomTokenSource, SequenceBatch
from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.search import AheadAssigner, BatchAssigner, StrategyOption
from hotspa_plugin.strategy import StrategyPool, padded_vocab_size

if TYPE_CHECKING:
    from hotspa_plugin.integrations.megatron.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCase:
    """One question to ``hotspa verify``, as sent to every process."""

    pool: str
    home: str | None = None
    model: str | None = "tiny-llama"  # the preset; None where the changes say all
    model_changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "fp32"
    packing: str = "packed"
    distributed_optimizer: bool = False
    lengths: tuple[tuple[int, ...], ...] = ()  # of each step
    vocab_size: int = 250
    make_vocab_size_divisible_by: int = 1
    seed: int = 1234
    policy: str = "balanced"
    switch_memory_bytes: int | None = None
    overlap: str = "none"  # a key of OVERLAPS
    ranks_per_node: int | None = None  # all on one node where None
    frozen: tuple[str, ...] = ()  # parameters whose name contains one of these are not trained
    keep_static: bool = False  # gradients of home's static run of the same batch, too; always in bf16
    lr: float = 1e-3
    clip_grad: float = 1.0
    options: tuple[StrategyOption, ...] = ()  # where given, each batch is divided by its own lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """What rank 0 saw in one step; tensors are whole, by name."""

    parameters: dict[str, torch.Tensor]  # before the step
    gradients: dict[str, torch.Tensor]
    static_gradients: dict[str, torch.Tensor] | None  # home alone, same batch, where asked for
    loss: float
    num_target_tokens: int
    sequences: int


def dtype_of(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def make_spec(case: VerifyCase, world_size: int):
    """The checked pool and the model, padded for every tp of the pool."""
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec

    pool = StrategyPool.parse(case.pool, home=case.home)
    longest = max((length for step in case.lengths for length in step), default=0)
    if longest > pool.bounds_tokens[-1]:
        raise ValueError(
            f"a sequence has {longest} tokens, over the pool's last bound {pool.bounds_tokens[-1]}: raise the bound or "
            "leave the sequence out"
        )
    vocab_size = padded_vocab_size(case.vocab_size, case.make_vocab_size_divisible_by, pool.strategies)
    model = ModelConfig.model_validate({"preset": case.model, **case.model_changes})
    spec = GPTSpec.from_config(model, padded_vocab_size=vocab_size, max_positions=max(pool.bounds_tokens))
    return pool.check(world_size=world_size, model=spec.shape), spec


def make_batch(case: VerifyCase, step: int) -> SequenceBatch:
    lengths = case.lengths[step]
    source = RandomTokenSource(lengths, vocab_size=case.vocab_size, seed=case.seed + step)
    return SequenceBatch(step=step, source=source, indices=np.arange(len(lengths)))


def build_trainer(case: VerifyCase) -> Trainer:
    """The trainer of ``case`` on this rank; what is in the slabs is poisoned before each switch."""
    prepare_process()
    from hotspa_plugin.integrations.megatron.home import OptimizerSettings
    from hotspa_plugin.integrations.megatron.session import SwitchOptions
    from hotspa_plugin.integrations.megatron.trainer import Trainer
    from hotspa_plugin.runtime.mover import OVERLAPS

    pool, spec = make_spec(case, dist.get_world_size())
    nodes = np.arange(dist.get_world_size()) // case.ranks_per_node if case.ranks_per_node else None
    trainer = Trainer(
        spec,
        pool,
        dtype=dtype_of(case.dtype),
        optimizer=OptimizerSettings(lr=case.lr, distributed=case.distributed_optimizer, clip_grad=case.clip_grad),
        packing=case.packing,
        seed=case.seed,
        switch=SwitchOptions(
            policy=case.policy,
            memory_budget_bytes=case.switch_memory_bytes,
            node_of_rank=nodes,
            overlap=OVERLAPS[case.overlap],
        ),
        freeze=(lambda name: any(part in name for part in case.frozen)) if case.frozen else None,
        assigner=AheadAssigner(BatchAssigner(case.options, packing=case.packing)) if case.options else None,
    )
    trainer.loop.switcher.poison = True
    return trainer


def run_ranks(case: VerifyCase, folder: str) -> dict[str, Any]:
    """Trains ``case`` on every rank, leaving each step's evidence in ``folder``; rank 0 returns a summary."""
    return train_and_keep_evidence(build_trainer(case), case, folder)


def train_and_keep_evidence(trainer: Trainer, case: VerifyCase, folder: str) -> dict[str, Any]:
    """Trains ``case`` with a trainer built for it; see :func:`run_ranks`."""
    from hotspa_plugin.process_groups.registry import num_live_groups

    rank = dist.get_rank()
    groups_after_start = num_live_groups()
    differing: dict[str, None] = {}
    losses, sequences = [], 0
    for step in range(len(case.lengths)):
        batch = make_batch(case, step)
        if case.options and step + 1 < len(case.lengths):
            trainer.loop.assigner.prepare(make_batch(case, step + 1).lengths)
        parameters, _ = trainer.gather_parameters()
        static_gradients = None
        if case.keep_static or case.dtype == "bf16":
            trainer.accumulate_static(batch)
            static_gradients, _ = trainer.gather_gradients()
        result = trainer.accumulate(batch)
        gradients, differ = trainer.gather_gradients()
        differing.update(dict.fromkeys(f"gradient of {name}" for name in differ))
        trainer.update()
        losses.append(result.loss)
        sequences += sum(bucket.sequences for bucket in result.buckets)
        if rank == 0:
            evidence = StepEvidence(
                parameters=parameters, gradients=gradients, static_gradients=static_gradients, loss=result.loss,
                num_target_tokens=result.num_target_tokens, sequences=sum(b.sequences for b in result.buckets),
            )  # fmt: skip
            torch.save(dataclasses.asdict(evidence), Path(folder, f"step{step}.pt"))
    final, differ = trainer.gather_parameters()
    differing.update(dict.fromkeys(f"parameter {name}" for name in differ))
    moved = trainer.check_switches()
    if case.options:
        trainer.loop.assigner.close()
    if rank == 0:
        torch.save(final, Path(folder, "final.pt"))
    return {
        "tensor_parallel_copies_differing": list(differing),
        "parameters_bit_identical": not moved,
        "parameters_moved_wrongly": moved,
        "num_process_groups_after_start": groups_after_start,
        "num_process_groups_at_end": num_live_groups(),
        "sequences_trained": sequences,
    }


def run_reference(case: VerifyCase, pool_world_size: int, folder: str) -> list[dict[str, Any]]:
    """Compares each step's evidence with one process running the same batch from the same parameters."""
    prepare_process(on_cpu=True)
    from hotspa_plugin.integrations.megatron.reference import Reference, tensor_errors, whole_error

    _, spec = make_spec(case, pool_world_size)
    reference = Reference(spec)
    rows = []
    for step in range(len(case.lengths)):
        evidence = torch.load(Path(folder, f"step{step}.pt"), weights_only=True)
        batch = make_batch(case, step)
        reference.load({name: value.float() for name, value in evidence["parameters"].items()})
        loss_sum, num_targets, gradients = reference.gradients([batch.sample(i) for i in range(len(batch.indices))])
        expected = {n: g for n, g in reference.gather(gradients).items() if n in evidence["gradients"]}
        errors = tensor_errors(evidence["gradients"], expected)
        row = {
            "loss": evidence["loss"],
            "reference_loss": loss_sum / max(num_targets, 1),
            "target_tokens": evidence["num_target_tokens"],
            "reference_target_tokens": num_targets,
            "errors": [(e.name, e.error) for e in errors],
            "whole_error": whole_error(evidence["gradients"], expected),
        }
        if evidence["static_gradients"] is not None:
            row["static_whole_error"] = whole_error(evidence["static_gradients"], expected)
        rows.append(row)
    return rows
