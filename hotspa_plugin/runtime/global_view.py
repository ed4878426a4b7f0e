"""Whole global tensors from every rank's shards, and back: slow, simple, and independent of the planner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from hotspa_plugin.layout import Shard, ShardLayout


def shard_view(parameter: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The part of a local parameter that ``shard`` describes, shaped like its region."""
    return parameter.as_strided(shard.region.shape, shard.strides, parameter.storage_offset() + shard.storage_offset)


def load_global(
    layout: ShardLayout, rank: int, values: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]
) -> None:
    """Fills this rank's local tensors from whole global ones, by tensor name."""
    with torch.no_grad():
        for shard in layout.shards(rank):
            name = layout.tensors[shard.tensor].name
            shard_view(into[shard.parameter], shard).copy_(_slice(values[name], shard))


def gather_global(
    layout: ShardLayout, rank: int, local: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
    """Assembles every global tensor on rank 0; collective over the world.

    Returns (tensors by name on rank 0 and None elsewhere, names of tensors of which some copies differ in
    any bit; known on rank 0 only). A tensor that ``local`` lacks (a frozen parameter's gradient) is left out.
    """
    mine = [
        (shard, shard_view(local[shard.parameter], shard).detach().cpu().clone())
        for shard in layout.shards(rank)
        if shard.parameter in local
    ]
    gathered = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is None:
        return None, []
    whole: dict[str, torch.Tensor] = {}
    first_copy: dict[tuple, torch.Tensor] = {}
    filled: dict[str, int] = {}
    differing: dict[str, None] = {}
    for shards in gathered:
        for shard, value in shards:
            spec = layout.tensors[shard.tensor]
            if (first := first_copy.setdefault((spec.name, shard.region), value)) is not value:
                if not torch.equal(first, value):
                    differing[spec.name] = None
                continue
            target = whole.setdefault(spec.name, torch.full(spec.shape, float("nan"), dtype=value.dtype))
            _slice(target, shard).copy_(value)
            filled[spec.name] = filled.get(spec.name, 0) + value.numel()
    for name, tensor in whole.items():
        if filled[name] != tensor.numel():
            raise RuntimeError(f"tensor {name}: ranks hold {filled[name]} of its {tensor.numel()} elements")
    return whole, list(differing)


def _slice(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    return whole[tuple(slice(low, high) for low, high in zip(shard.region.low, shard.region.high, strict=True))]
