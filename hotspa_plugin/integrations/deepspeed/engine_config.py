"""The DeepSpeed configuration that the one engine, home's, is given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hotspa_plugin.integrations.deepspeed.config_block import KEY

_PRECISION = ("bf16", "bfloat16", "data_types")


def compute_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """What the strategies compute in: bfloat16 where the configuration enables it, else float32."""
    enabled = any((config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16"))
    return torch.bfloat16 if enabled else torch.float32


def zero_stage(config: Mapping[str, Any]) -> int:
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def train_batch_size(config: Mapping[str, Any], world_size: int) -> int:
    """Sequences of a global batch, by DeepSpeed's rule for its three keys, the data-parallel size being the world's."""
    total = config.get("train_batch_size")
    micro = config.get("train_micro_batch_size_per_gpu")
    accumulation = config.get("gradient_accumulation_steps")
    for key, value in (("train_batch_size", total), ("train_micro_batch_size_per_gpu", micro),
                       ("gradient_accumulation_steps", accumulation)):  # fmt: skip
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{key} is {value!r}, but must be a whole number of at least 1")
    if total is None and micro is None:
        raise ValueError("train_batch_size is missing: write how many sequences one optimizer step takes")
    derived = None if micro is None else micro * (accumulation or 1) * world_size
    if total is None:
        return derived
    if micro is not None and accumulation is not None and derived != total:
        raise ValueError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} * "
            f"gradient_accumulation_steps {accumulation} * {world_size} ranks: correct or leave out one of them"
        )
    return total


def engine_config(config: Mapping[str, Any], *, home_dp: int, world_size: int) -> dict[str, Any]:
    """``config`` for the engine over home: one backward pass a step, in fp32.

    The plugin keeps the bf16 copies that are computed with, so that gradients reach the optimizer in fp32.
    """
    total = train_batch_size(config, world_size)
    if total % home_dp:
        raise ValueError(
            f"train_batch_size {total} is not a multiple of home's {home_dp} data-parallel replicas, which "
            "DeepSpeed asks for"
        )
    kept = {key: copy.deepcopy(value) for key, value in config.items() if key not in (KEY, *_PRECISION)}
    kept["train_batch_size"] = total
    kept["train_micro_batch_size_per_gpu"] = total // home_dp
    kept["gradient_accumulation_steps"] = 1
    return kept
