"""What a rank surely holds, reckoned by hand. No ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hotspa_plugin.integrations.deepspeed.memory import check_memory, resident_memory
from hotspa_plugin.layout import Region, Shard, ShardLayout, TensorSpec


def layout(label: str, tp: int, num_ranks: int = 4, dtype: str = "float32") -> ShardLayout:
    """A weight of 8 x 10 cut along its rows, and a frozen vector of 6 that is whole everywhere."""
    tensors = [
        TensorSpec(name="weight", shape=(8, 10), dtype=dtype),
        TensorSpec(name="frozen", shape=(6,), dtype=dtype, trainable=False),
    ]
    rows = 8 // tp
    shards = [
        (
            Shard(tensor=0, region=Region(low=(rows * t, 0), high=(rows * t + rows, 10)), parameter="weight",
                  storage_offset=0, strides=(10, 1)),
            Shard(tensor=1, region=Region(low=(0,), high=(6,)), parameter="frozen", storage_offset=0, strides=(1,),
                  tp_copy=t),
        )
        for t in (rank % tp for rank in range(num_ranks))
    ]  # fmt: skip
    dp_rank = np.arange(num_ranks) // tp
    return ShardLayout.from_ranks(label=label, tensors=tensors, shards_of_rank=shards, dp_rank=dp_rank)


@pytest.mark.parametrize(
    ("stage", "optimizer", "item_size_bytes", "home_bytes", "slab_bytes"),
    [
        # Home (tp2): 46 elements, 40 of them trained; tp1: 86 and 80.
        (0, "AdamW", 4, 46 * 4 + 40 * (4 + 8), 86 * 4 + 80 * 4),
        (1, "AdamW", 4, 46 * 4 + 40 * (4 + 8 // 2), 86 * 4 + 80 * 4),
        (2, "Lion", 2, 46 * (4 + 2) + 40 * (4 + 4 // 2), 86 * 2 + 80 * 4),
        (3, "", 4, 46 * (4 // 2 + 4) + 40 * 4, 86 * 4 + 80 * 4),
    ],
)
def test_bytes(stage, optimizer, item_size_bytes, home_bytes, slab_bytes):
    slab, home = resident_memory(
        {"tp1": layout("tp1", 1), "tp2": layout("tp2", 2)}, home="tp2", home_dp=2, zero_stage=stage,
        optimizer=optimizer, item_size_bytes=item_size_bytes, staging_bytes=100,
    )  # fmt: skip
    assert (home.strategy, home.home_bytes, home.slab_bytes, home.staging_bytes) == ("tp2", home_bytes, 0, 0)
    assert (slab.strategy, slab.home_bytes, slab.slab_bytes, slab.staging_bytes) == ("tp1", home_bytes, slab_bytes, 100)
    check_memory((slab, home), home_bytes + slab_bytes + 100)
    check_memory((slab, home), None)
    with pytest.raises(ValueError, match=r"hotspa.pool: strategy tp1 needs .* GiB a rank before any activation"):
        check_memory((slab, home), home_bytes + slab_bytes + 99)
