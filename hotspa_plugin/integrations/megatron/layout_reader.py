"""Reads shard layouts from ``sharded_state_dict()``, Megatron's own account of what a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from hotspa_plugin.integrations.megatron.gradient_class import gradient_class
from hotspa_plugin.layout import Region, Shard, TensorSpec


def named_parameters(chunks: Sequence[MegatronModule]) -> dict[str, torch.nn.Parameter]:
    """Parameters of all model chunks of a rank, named ``<chunk>.<parameter>``; a shared one appears once."""
    return {f"{i}.{name}": parameter for i, chunk in enumerate(chunks) for name, parameter in chunk.named_parameters()}


def read_rank(
    chunks: Sequence[MegatronModule], config: TransformerConfig, dp_rank: int
) -> list[tuple[TensorSpec, Shard]]:
    """Every tensor that this rank holds a shard of, with that shard (whose ``tensor`` index is not set yet).

    The strategy's parallel state must be active. Raises ValueError for a parameter or persistent buffer that
    ``sharded_state_dict`` does not place, or places only in part.
    """
    parameters = named_parameters(chunks)
    found: list[tuple[TensorSpec, Shard]] = []
    covered = dict.fromkeys(parameters, 0)
    for chunk in chunks:
        for sharded in _sharded_tensors(chunk.sharded_state_dict()):
            name = _owner(sharded, parameters)
            spec, shard = _read(sharded, name, parameters[name], config, dp_rank)
            found.append((spec, shard))
            covered[name] += shard.region.num_elements
    for name, parameter in parameters.items():
        if covered[name] != parameter.numel():
            raise ValueError(
                f"parameter {name} has {parameter.numel()} elements, but sharded_state_dict() places "
                f"{covered[name]} of them: the module that owns it must describe it for checkpointing"
            )
    return found


def _sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensorFactory):
        yield from _sharded_tensors(state.build())
    elif isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, ShardedObject):
        if not state.key.endswith("_extra_state"):
            raise ValueError(f"{state.key} is an object, not a tensor: hot switching does not know how to move it")
        # TransformerEngine's extra state holds fp8 scales only, and fp8 is refused.
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _sharded_tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _sharded_tensors(value)
    else:
        raise ValueError(f"sharded_state_dict() holds a {type(state).__name__}, which hot switching does not know")


def _owner(sharded: ShardedTensor, parameters: Mapping[str, torch.nn.Parameter]) -> str:
    """Name of the parameter of which ``sharded.data`` is a view."""
    data = sharded.data
    storage = data.untyped_storage().data_ptr()
    for name, parameter in parameters.items():
        start = parameter.storage_offset()
        if (
            parameter.untyped_storage().data_ptr() == storage
            and parameter.dtype == data.dtype
            and start <= data.storage_offset() < start + parameter.numel()
        ):
            return name
    raise ValueError(
        f"persistent buffer {sharded.key} is no parameter, and hot switching does not know whether to move, add or "
        "derive it"
    )


def _read(
    sharded: ShardedTensor, name: str, parameter: torch.nn.Parameter, config: TransformerConfig, dp_rank: int
) -> tuple[TensorSpec, Shard]:
    # Leading axes count layers (and experts). Each of those is a tensor of its own here: some may be frozen.
    data, num_leading = sharded.data, sharded.prepend_axis_num
    offset, global_shape = tuple(sharded.global_offset), tuple(sharded.global_shape)
    low = offset[num_leading:]
    stage_copy, tp_copy, dp_copy = sharded.replica_id
    if dp_copy != dp_rank:
        raise ValueError(
            f"{sharded.key} is data-parallel copy {dp_copy} on data-parallel rank {dp_rank}: "
            "tensors sharded over data parallel cannot be hot-switched"
        )
    spec = TensorSpec(
        name=sharded.key + "".join(f"[{index}]" for index in offset[:num_leading]),
        shape=global_shape[num_leading:],
        dtype=str(data.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
    )
    shard = Shard(
        tensor=-1,
        region=Region(low=low, high=tuple(l + n for l, n in zip(low, data.shape, strict=True))),
        parameter=name,
        storage_offset=data.storage_offset() - parameter.storage_offset(),
        strides=tuple(data.stride()),
        stage_copy=stage_copy,
        tp_copy=tp_copy,
        gradient_class=gradient_class(name, parameter, config),
    )
    return spec, shard
