"""One shard layout from what every rank says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hotspa_plugin.layout import Shard, ShardLayout, TensorSpec


def gather_layout(
    label: str,
    rank_shards: Sequence[tuple[TensorSpec, Shard]],
    dp_rank: int,
    group: dist.ProcessGroup | None = None,
) -> ShardLayout:
    """The layout of all ranks from each one's own shards, whose ``tensor`` index is not set yet.

    Collective over ``group`` (default: the world). Raises ValueError where two ranks describe a tensor differently.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (list(rank_shards), dp_rank), group=group)
    specs: dict[str, TensorSpec] = {}
    for rank, (shards, _) in enumerate(gathered):
        for spec, _ in shards:
            if specs.setdefault(spec.name, spec) != spec:
                raise ValueError(
                    f"layout {label}: rank {rank} holds {spec}, another rank {specs[spec.name]}: "
                    "all ranks must build the same model"
                )
    names = sorted(specs)
    index = {name: i for i, name in enumerate(names)}
    return ShardLayout.from_ranks(
        label=label,
        tensors=[specs[name] for name in names],
        shards_of_rank=[
            tuple(dataclasses.replace(shard, tensor=index[spec.name]) for spec, shard in shards)
            for shards, _ in gathered
        ],
        dp_rank=[dp for _, dp in gathered],
    )
