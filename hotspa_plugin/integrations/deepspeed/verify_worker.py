"""What the ranks, and the one-process reference, do for ``hotspa verify --engine deepspeed``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin.integrations.deepspeed.model_checks import EXACT_FAMILIES
from hotspa_plugin.integrations.megatron import verify_worker as megatron_worker
from hotspa_plugin.integrations.megatron.verify_worker import StepEvidence, VerifyCase, make_batch

# Tiny models of transformers' families; every other name is a preset of our own, built by Megatron-core.
_HUGGING_FACE_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
HUGGING_FACE_MODELS = tuple(f"hf-{family}" for family in EXACT_FAMILIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedVerifyCase(VerifyCase):
    """A ``VerifyCase`` under DeepSpeed. ``distributed_optimizer`` stands for ZeRO 1 where ``zero_stage`` is 0."""

    zero_stage: int = 0


def is_hugging_face(name: str) -> bool:
    return name.startswith("hf-")


def make_hugging_face_model(case: VerifyCase) -> torch.nn.Module:
    """A small random model, the same in every process. Raises ValueError for a family that is not known."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if case.model not in HUGGING_FACE_MODELS:
        raise ValueError(f"model {case.model!r} is unknown: choose one of {', '.join(HUGGING_FACE_MODELS)}")
    sizes = {**_HUGGING_FACE_SIZES, "vocab_size": case.vocab_size, **case.model_changes}
    config = AutoConfig.for_model(case.model.removeprefix("hf-"), **sizes)
    torch.manual_seed(case.seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms that are all 1 and biases that are all 0 would hide mistakes.
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.requires_grad = not any(part in name for part in case.frozen)
    return model


def make_engine(case: VerifyCase):
    """The engine of ``case``; collective over the world."""
    from hotspa_plugin.integrations.deepspeed.initialize import initialize

    stage = getattr(case, "zero_stage", 0) or int(case.distributed_optimizer)
    config = {
        "train_batch_size": dist.get_world_size(),
        "gradient_clipping": case.clip_grad,
        "bf16": {"enabled": case.dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "hotspa": {
            "pool": case.pool,
            "home": case.home,
            "packing": case.packing,
            "seed": case.seed,
            "switch": {
                "policy": case.policy,
                "memory_mb": None if case.switch_memory_bytes is None else case.switch_memory_bytes / 2**20,
            },
        },
    }
    model = make_hugging_face_model(case) if is_hugging_face(case.model) else _megatron_builder(case)
    return initialize(model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=case.lr), config=config)[0]


def _megatron_builder(case: VerifyCase):
    from hotspa_plugin.integrations.megatron.gpt import build_gpt, freeze_parameters

    _, spec = megatron_worker.make_spec(case, dist.get_world_size())
    dtype = megatron_worker.dtype_of(case.dtype)

    def build(strategy, initialize):
        chunks = build_gpt(spec, strategy, dtype, initialize=initialize)
        for chunk in chunks:
            freeze_parameters(chunk, lambda name: any(part in name for part in case.frozen))
        return chunks

    return build


def run_ranks(case: VerifyCase, folder: str) -> dict[str, Any]:
    """Trains ``case`` on every rank, leaving each step's evidence in ``folder``; returns a summary."""
    from hotspa_plugin.integrations.deepspeed.process import prepare_process
    from hotspa_plugin.process_groups.registry import num_live_groups

    prepare_process()
    if not is_hugging_face(case.model):
        from hotspa_plugin.integrations.megatron import process

        process.prepare_process()
    engine = make_engine(case)
    engine.loop.switcher.poison = True
    groups_after_start = num_live_groups()
    differing: dict[str, None] = {}
    losses, sequences = [], 0
    for step in range(len(case.lengths)):
        batch = make_batch(case, step)
        parameters, _ = engine.gather_parameters()
        static_gradients = None
        if case.dtype == "bf16":
            static_gradients = _static_gradients(engine, batch)
        loss = engine(batch)
        gradients, differ = engine.gather_gradients()
        differing.update(dict.fromkeys(f"gradient of {name}" for name in differ))
        engine.step()
        losses.append(loss.item())
        result = engine.last_result
        sequences += sum(bucket.sequences for bucket in result.buckets)
        if dist.get_rank() == 0:
            evidence = StepEvidence(
                parameters=parameters, gradients=gradients, static_gradients=static_gradients, loss=result.loss,
                num_target_tokens=result.num_target_tokens, sequences=len(batch.indices),
            )  # fmt: skip
            torch.save(dataclasses.asdict(evidence), Path(folder, f"step{step}.pt"))
    _, differ = engine.gather_parameters()
    differing.update(dict.fromkeys(f"parameter {name}" for name in differ))
    moved = engine.check_switches()
    return {
        "tensor_parallel_copies_differing": list(differing),
        "parameters_bit_identical": not moved,
        "parameters_moved_wrongly": moved,
        "num_process_groups_after_start": groups_after_start,
        "num_process_groups_at_end": num_live_groups(),
        "sequences_trained": sequences,
    }


def _static_gradients(engine, batch) -> dict[str, torch.Tensor] | None:
    """What home alone would give for the batch; the gradient is thrown away."""
    loop = engine.loop
    engine.loop = loop.only_home()
    try:
        engine(batch)
        return engine.gather_gradients()[0]
    finally:
        engine.loop = loop
        engine.discard_gradient()


def run_reference(case: VerifyCase, pool_world_size: int, folder: str) -> list[dict[str, Any]]:
    """Compares each step's evidence with one process running the same batch from the same parameters."""
    if not is_hugging_face(case.model):
        return megatron_worker.run_reference(case, pool_world_size, folder)
    from hotspa_plugin.integrations.deepspeed.reference import gradients
    from hotspa_plugin.runtime.tensor_error import tensor_errors, whole_error

    model = make_hugging_face_model(case)
    named = dict(model.named_parameters())
    rows = []
    for step in range(len(case.lengths)):
        evidence = torch.load(Path(folder, f"step{step}.pt"), weights_only=True)
        with torch.no_grad():
            for name, value in evidence["parameters"].items():
                named[name].copy_(value.float())
        batch = make_batch(case, step)
        loss_sum, num_targets, found = gradients(model, [batch.sample(i) for i in range(len(batch.indices))])
        expected = {name: found[name] for name in evidence["gradients"]}
        row = {
            "loss": evidence["loss"],
            "reference_loss": loss_sum / max(num_targets, 1),
            "target_tokens": evidence["num_target_tokens"],
            "reference_target_tokens": num_targets,
            "errors": [(e.name, e.error) for e in tensor_errors(evidence["gradients"], expected)],
            "whole_error": whole_error(evidence["gradients"], expected),
        }
        if evidence["static_gradients"] is not None:
            row["static_whole_error"] = whole_error(evidence["static_gradients"], expected)
        rows.append(row)
    return rows
