"""Reads shard layouts from DTensor placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from hotspa_plugin.layout import GradientClass, Region, Shard, TensorSpec


def read_rank(
    parameters: Mapping[str, torch.Tensor],
    *,
    tp_rank: int,
    dtype: torch.dtype,
    trainable: Mapping[str, bool],
    is_partial: Callable[[str], bool],
) -> list[tuple[TensorSpec, Shard]]:
    """Every tensor that this rank holds a shard of, with that shard (whose ``tensor`` index is not set yet).

    ``parameters`` are plain tensors, whole on every rank, or DTensors on a mesh along tensor parallel. Local shards
    are contiguous. ``is_partial(name)`` says which of the whole ones hold only a part of their gradient. Raises
    ValueError for a placement other than even shards and replicas.
    """
    found = []
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        low, high = [0] * len(shape), list(shape)
        replicated = True
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if isinstance(placement, ShardPlacement):
                replicated = False
                size = parameter.device_mesh.size()
                if shape[placement.dim] % size:
                    raise ValueError(
                        f"parameter {name}: dim {placement.dim} of {shape[placement.dim]} elements does not "
                        f"divide by tp {size}"
                    )
                extent = shape[placement.dim] // size
                low[placement.dim] = tp_rank * extent
                high[placement.dim] = low[placement.dim] + extent
            elif not isinstance(placement, Replicate):
                raise ValueError(f"parameter {name} is placed as {placement}, which hot switching does not know")
        region = Region(low=tuple(low), high=tuple(high))
        partial = replicated and is_partial(name)
        spec = TensorSpec(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."), trainable=trainable[name])
        shard = Shard(
            tensor=-1,
            region=region,
            parameter=name,
            storage_offset=0,
            strides=torch.empty(region.shape, device="meta").stride(),
            tp_copy=tp_rank if replicated else 0,
            gradient_class=GradientClass.PARTIAL if partial else GradientClass.IDENTICAL,
        )
        found.append((spec, shard))
    return found
