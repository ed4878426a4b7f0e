"""What rank processes do for the DeepSpeed tests."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=4096)  # fmt: skip


def prepare() -> None:
    """Leaves out the compiled shared-memory op, which would take most of a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_model(family: str, seed: int = 0, **changes: Any):
    """A tiny random model of a transformers family, the same wherever it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, **changes}
    if family == "qwen3":
        sizes.setdefault("head_dim", 8)
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases that are all 1 or 0 hide errors
    return model


def make_batch(lengths: list[int], seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[np.ndarray]:
    generator = np.random.RandomState(seed)
    return [generator.randint(0, vocab_size, length) for length in lengths]


def ds_config(*, pool: str | None, stage: int = 0, **changes: Any) -> dict[str, Any]:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    if pool is not None:
        config["hotspa"] = {"pool": pool, **changes.pop("block", {})}
    config.update(changes)
    return config


def train(*, family: str, config: dict[str, Any], batches: list[list[int]], sizes: dict | None = None) -> dict[str, Any]:
    """Trains one step per batch on every rank; rank 0 returns losses, norms and whole weights."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    engine, *_ = hotspa.initialize(model=make_model(family, **(sizes or {})), config=config)
    engine.loop.switcher.poison = True
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        losses.append(engine.train_batch(make_batch(lengths, step)).item())
        norms.append(float(engine.get_global_grad_norm() or "nan"))
    weights, differing = engine.gather_parameters()
    return {"losses": losses, "norms": norms, "weights": weights, "differing": differing}


def train_reference(*, family: str, batches: list[list[int]], sizes: dict | None = None) -> dict[str, Any]:
    """The same in one process: transformers' own attention, torch's AdamW and clipping, sequence by sequence."""
    model = make_model(family, **(sizes or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        optimizer.zero_grad()
        num_targets = sum(length - 1 for length in lengths)
        total = 0.0
        for tokens in map(torch.from_numpy, make_batch(lengths, step)):
            if len(tokens) == 1:
                continue
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "weights": {n: p.data for n, p in model.named_parameters()}}
