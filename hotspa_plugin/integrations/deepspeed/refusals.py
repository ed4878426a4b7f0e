"""Settings of a DeepSpeed configuration that cannot be combined with hot switching, each refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotspa_plugin.integrations.deepspeed.config_block import KEY

# Optimizers whose update of an element depends on that element alone, so that shards may be updated apart.
ELEMENTWISE_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "sgd")

# The beginnings of names, in lower case, of optimizers that look at whole tensors.
_NOT_ELEMENTWISE = (
    "lamb", "fusedlamb", "lars", "adafactor", "muon", "shampoo", "soap", "lbfgs", "galore", "onebit", "zerooneadam",
    "sparseadam",
)  # fmt: skip
_BF16_KEYS = (
    "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states",
)  # fmt: skip
# Numbers that would only be missed in the middle of a step, and the least that each may be.
_NUMBERS = (
    (("gradient_clipping",), 0.0),
    (("steps_per_print",), 0.0),
    (("optimizer", "params", "lr"), 0.0),
    (("optimizer", "params", "eps"), 0.0),
    (("optimizer", "params", "weight_decay"), 0.0),
)
# Read here, so what they are must be checked before DeepSpeed does.
_BLOCKS = ("zero_optimization", "bf16", "bfloat16", "fp16", "optimizer", "scheduler", "tensor_parallel", "compile")

_STRATEGIES_ELSEWHERE = "the pool decides how the model is split: take this setting out"
_LOSSY = "gradients would no longer be exact: take this setting out"
# (keys from the top, what to do instead). A block counts as used where it is enabled, a plain value where it is true.
_REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("fp16",), "loss scaling is not supported: use bf16 or fp32"),
    (("amp",), "use bf16 or fp32"),
    (("torch_autocast",), "use bf16 or fp32"),
    (("autotuning",), "tune without the hotspa block, then add it"),
    (("compile", "deepcompile"), "strategies run outside of DeepSpeed's module, which it would compile alone"),
    (("tensor_parallel", "autotp_size"), f"AutoTP: {_STRATEGIES_ELSEWHERE}"),
    (("pipeline",), f"PipelineEngine: {_STRATEGIES_ELSEWHERE}"),
    (("sequence_parallel_size",), f"Ulysses: {_STRATEGIES_ELSEWHERE}"),
    (("hybrid_engine",), "generation with DeepSpeed's hybrid engine needs the whole model in one module"),
    (("sparse_gradients",), _LOSSY),
    (("communication_data_type",), _LOSSY),
    (("compression_training",), "strategies run outside of DeepSpeed's module, which it would compress alone"),
    (("progressive_layer_drop",), "strategies run outside of DeepSpeed's module"),
    (("eigenvalue",), "strategies run outside of DeepSpeed's module"),
    (("curriculum_learning",), "it cuts sequences: choose the data yourself"),
    (("data_efficiency",), "it draws or cuts samples by itself: choose the data yourself"),
    (("flops_profiler",), "strategies run outside of DeepSpeed's module, which computes nothing to profile"),
    (("zero_optimization", "zero_quantized_weights"), _LOSSY),
    (("zero_optimization", "zero_quantized_gradients"), _LOSSY),
    (("zero_optimization", "zero_quantized_nontrainable_weights"), _LOSSY),
    (("zero_optimization", "mics_shard_size"), "MiCS is not supported: use ZeRO 1 or 2"),
    (("zero_optimization", "offload_param"), "home's parameters stay on the device here, so offloading saves nothing"),
    (("zero_optimization", "offload_optimizer"), "optimizer offload is not supported"),
    (("zero_optimization", "cpu_offload"), "optimizer offload is not supported"),
    (("zero_optimization", "cpu_offload_params"), "home's parameters stay on the device here"),
    (("bf16", "bf16_master_weights_and_grads"), "home's weights and gradients are fp32: take this setting out"),
    (("bf16", "bf16_optimizer_states"), "home's optimizer state is fp32: take this setting out"),
    (("zero_optimization", "zenflow"), _LOSSY),
)


def find_problems(config: Mapping[str, Any]) -> list[str]:
    """One line for each setting of a DeepSpeed configuration that hot switching refuses; none where it fits."""
    found = [f"{key}: 'auto' is filled in by other software; write a value" for key in _auto_keys(config)]
    found += [
        f"{key}: is {json.dumps(config[key], default=str)}, but must be a block {{...}}"
        for key in _BLOCKS
        if config.get(key) is not None and not isinstance(config[key], Mapping)
    ]
    for path, advice in _REFUSED:
        if _is_used(path[-1], _look_up(config, path)):
            found.append(f"{'.'.join(path)}: {advice}")
    optimizer = config.get("optimizer")
    if isinstance(optimizer, Mapping):
        name = str(optimizer.get("type", ""))
        if name.lower() not in ELEMENTWISE_OPTIMIZERS:
            why = (
                "compresses gradients"
                if "bit" in name.lower() or "zeroone" in name.lower()
                else "is not known to update elementwise"
            )
            found.append(f"optimizer.type: {name or 'none given'} {why}: use one of Adam, AdamW, Adagrad, Lion, SGD")
    for path, at_least in _NUMBERS:
        value = _look_up(config, path)
        if value not in (None, "auto") and not _is_number(value, at_least=at_least):
            found.append(f"{'.'.join(path)}: is {json.dumps(value)}, but must be a number of at least {at_least:g}")
    stage = _look_up(config, ("zero_optimization", "stage"))
    if stage not in (None, "auto") and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        found.append(f"zero_optimization.stage: is {json.dumps(stage)}, but must be 0, 1, 2 or 3")
    accumulation = _look_up(config, ("data_types", "grad_accum_dtype"))
    if accumulation not in (None, "auto", "fp32"):
        found.append(f"data_types.grad_accum_dtype: is {json.dumps(accumulation)}, but gradients are summed in fp32")
    return found + _bf16_problems(config)


def _bf16_problems(config: Mapping[str, Any]) -> list[str]:
    """DeepSpeed never sees this block, so what it would refuse in it must be refused here."""
    found = []
    for name in ("bf16", "bfloat16"):
        block = config.get(name)
        for key, value in block.items() if isinstance(block, Mapping) else ():
            if key not in _BF16_KEYS:
                found.append(f"{name}.{key}: is not a known key; known are {', '.join(_BF16_KEYS)}")
            elif value != "auto" and not isinstance(value, bool):
                found.append(f"{name}.{key}: is {json.dumps(value)}, but must be true or false")
    return found


def check_optimizer(optimizer: object) -> None:
    """Raises ValueError for an optimizer of the user's own that is known to look beyond single elements."""
    name = type(optimizer).__name__
    if name.lower().startswith(_NOT_ELEMENTWISE):
        raise ValueError(
            f"optimizer: {name} does not update elementwise, and home's parameters lie in shards: use one of Adam, "
            "AdamW, Adagrad, Lion, SGD"
        )


def _look_up(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _auto_keys(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if key == KEY:
            continue  # a pool may be planned
        if value == "auto":
            found.append(f"{prefix}{key}")
        elif isinstance(value, Mapping):
            found += _auto_keys(value, f"{prefix}{key}.")
    return found


def _is_number(value: Any, *, at_least: float) -> bool:
    # A comparison with NaN is False, too.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= at_least


def _is_used(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        if key in ("offload_param", "offload_optimizer"):
            return value.get("device", "none") != "none"
        if key in ("compression_training", "pipeline"):
            return bool(value)
        if key == "zenflow":
            return True
        return bool(value.get("enabled"))
    if key in ("autotp_size", "sequence_parallel_size"):
        return isinstance(value, int) and value > 1
    if key == "mics_shard_size":
        return isinstance(value, int) and value > 0
    if key == "communication_data_type":
        return value is not None and value not in ("fp32", "torch.float32")
    return bool(value)
