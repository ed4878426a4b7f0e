"""Whether a pool fits a rank's memory, from what is certain before a model is built."""

from __future__ import annotations

from collections.abc import Mapping

from hotspa_plugin.cost.resident import ResidentMemory, describe_shortage
from hotspa_plugin.layout import ShardLayout

_FP32_BYTES = 4
# fp32 numbers that an optimizer keeps for each parameter; of others none is certain.
_STATE_NUMBERS = {"adam": 2, "adamw": 2, "fusedadam": 2, "deepspeedcpuadam": 2, "adagrad": 1, "lion": 1}


def resident_memory(
    layouts: Mapping[str, ShardLayout],
    *,
    home: str,
    home_dp: int,
    zero_stage: int,
    optimizer: str,
    item_size_bytes: int,
    staging_bytes: int,
) -> tuple[ResidentMemory, ...]:
    """One entry per layout (by strategy), for the rank that holds most: what surely lies there beside activations.

    Home holds fp32 weights, which ZeRO 3 partitions over its ``home_dp`` replicas; a copy to compute with where that
    is not the same (``item_size_bytes`` each; bf16, or ZeRO 3); an fp32 gradient accumulator; and the state of
    ``optimizer`` (its name), which ZeRO partitions from stage 1 on. Another strategy adds its weights and
    accumulators. DeepSpeed's own buffers are not counted, so that nothing that could run is refused.
    """
    elements, trained = _fullest(layouts[home])
    own_copy = _FP32_BYTES / (home_dp if zero_stage == 3 else 1)
    computed_with = item_size_bytes if zero_stage == 3 or item_size_bytes < _FP32_BYTES else 0
    state = _FP32_BYTES * _STATE_NUMBERS.get(optimizer.lower(), 0) / (home_dp if zero_stage else 1)
    home_bytes = int(elements * (own_copy + computed_with) + trained * (_FP32_BYTES + state))
    found = []
    for label, layout in layouts.items():
        elements, trained = _fullest(layout)
        slab_bytes = 0 if label == home else elements * item_size_bytes + trained * _FP32_BYTES
        found.append(
            ResidentMemory(
                strategy=label,
                home_bytes=home_bytes,
                slab_bytes=slab_bytes,
                staging_bytes=min(staging_bytes, slab_bytes),
            )
        )
    return tuple(found)


def check_memory(needed: tuple[ResidentMemory, ...], available_bytes: int | None) -> None:
    """Raises ValueError with the figures where the fullest entry is over ``available_bytes`` (None: not known)."""
    if available_bytes is not None and max(entry.total_bytes for entry in needed) > available_bytes:
        raise ValueError(
            f"hotspa.pool: {describe_shortage(needed, available_bytes)}, zero_optimization.stage 1, or less "
            "hotspa.switch.memory_mb"
        )


def _fullest(layout: ShardLayout) -> tuple[int, int]:
    """(elements, trained ones among them) of the rank that holds most."""
    counts = []
    for holding in layout.holdings:
        sizes = [(shard.region.num_elements, layout.tensors[shard.tensor].trainable) for shard in holding]
        counts.append((sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)))
    return max(counts)
