"""What the ranks, and the one-process reference, do for a case of whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hotspa_plugin.fuzz.case import FuzzCase
from hotspa_plugin.integrations.megatron import verify_worker
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase
from hotspa_plugin.runtime.rank_failure import is_user_error


def verify_case_of(case: FuzzCase) -> VerifyCase:
    """The same question as ``hotspa verify`` asks it."""
    vocab_size, divisible_by = int(case.model["vocab_size"]), int(case.model["make_vocab_size_divisible_by"])
    elsewhere = {"vocab_size", "make_vocab_size_divisible_by"}
    return VerifyCase(
        pool=" ".join(case.pool),
        home=case.home,
        model=None,
        model_changes={name: value for name, value in case.model.items() if name not in elsewhere},
        dtype=case.dtype,
        packing=case.packing,
        distributed_optimizer=case.distributed_optimizer,
        lengths=case.lengths,
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=divisible_by,
        seed=case.seed,
        policy=case.policy,
        switch_memory_bytes=case.switch_memory_bytes,
        ranks_per_node=case.ranks_per_node,
        frozen=case.frozen,
    )


def run_ranks(case: VerifyCase, folder: str) -> dict[str, Any]:
    """Trains ``case`` like ``hotspa verify``; what is refused while the trainer is built comes back as ``refused``."""
    try:
        trainer = verify_worker.build_trainer(case)
    except Exception as error:
        if is_user_error(error):
            return {"refused": str(error)}
        raise
    return verify_worker.train_and_keep_evidence(trainer, case, folder)


def run_reference(case: VerifyCase, pool_world_size: int, folder: str) -> list[dict[str, Any]]:
    """The rows of ``hotspa verify``; with ``keep_static``, ``ill_conditioned`` names what fp32 cannot tell better."""
    rows = verify_worker.run_reference(case, pool_world_size, folder)
    for step, row in enumerate(rows):
        row["ill_conditioned"] = _ill_conditioned(case, pool_world_size, folder, step) if case.keep_static else set()
    return rows


def _ill_conditioned(case: VerifyCase, pool_world_size: int, folder: str, step: int) -> set[str]:
    from hotspa_plugin.fuzz.conditioning import ill_conditioned, true_gradients
    from hotspa_plugin.integrations.megatron.reference import Reference

    _, spec = verify_worker.make_spec(case, pool_world_size)
    evidence = torch.load(Path(folder, f"step{step}.pt"), weights_only=True)
    batch = verify_worker.make_batch(case, step)
    samples = [batch.sample(i) for i in range(len(batch.indices))]
    plain = Reference(spec)
    plain.load(evidence["parameters"])
    _, _, gradients = plain.gradients(samples)
    hot, names = evidence["gradients"], evidence["gradients"].keys()
    true = true_gradients(Reference(spec, torch.float64), evidence["parameters"], samples)
    whole = plain.gather(gradients)
    unswitched = [{n: whole[n] for n in names}, evidence["static_gradients"]]
    return ill_conditioned(hot, unswitched, {n: true[n] for n in names})
