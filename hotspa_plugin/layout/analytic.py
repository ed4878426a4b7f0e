"""Shard layouts of GPT models written down from their sizes alone, without building a model.

They follow the global keys and cuts of Megatron-core's ``sharded_state_dict``: one global tensor per
kind of layer parameter with the layer index as its leading dim, gate and up halves of a gated MLP cut
separately, query, key and value interleaved per query group, the vocabulary padded.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout.types import GradientClass, Holding, Region, Shard, ShardLayout, TensorSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTSizes:
    """The sizes of a GPT model that decide its parameters' shapes (counts of elements)."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_query_groups: int | None = None  # None: one per head
    kv_channels: int | None = None  # None: hidden_size / num_attention_heads
    gated_mlp: bool = True
    tied_embeddings: bool = False
    num_learned_positions: int = 0  # 0: rotary, or none
    biases: bool = False  # biases of the linear layers, and of the norms
    qk_norm: bool = False
    dtype: str = "bfloat16"

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    def padded_vocab_size(self, divisor: int) -> int:
        """The vocabulary rounded up to a multiple of ``divisor``."""
        return -(-self.vocab_size // divisor) * divisor


# How a parameter is cut along tensor parallel: the dim of the layer's own tensor, or not at all.
_REPLICATED = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    cut_dim: int | None
    num_chunks: int = 1  # gate and up: two chunks, each cut by itself
    identical_without_sp: bool = True  # False for q/k norms, which are partial either way


def _layer_parameters(sizes: GPTSizes) -> list[_Parameter]:
    h, ffn = sizes.hidden_size, sizes.ffn_hidden_size
    qkv = (sizes.num_attention_heads + 2 * sizes.query_groups) * sizes.head_size
    chunks = 2 if sizes.gated_mlp else 1
    prefix = "decoder.layers."
    found = [
        _Parameter(name=prefix + "input_layernorm.weight", shape=(h,), cut_dim=_REPLICATED),
        _Parameter(name=prefix + "self_attention.linear_qkv.weight", shape=(qkv, h), cut_dim=0),
        _Parameter(
            name=prefix + "self_attention.linear_proj.weight",
            shape=(h, sizes.num_attention_heads * sizes.head_size),
            cut_dim=1,
        ),
        _Parameter(name=prefix + "pre_mlp_layernorm.weight", shape=(h,), cut_dim=_REPLICATED),
        _Parameter(name=prefix + "mlp.linear_fc1.weight", shape=(chunks * ffn, h), cut_dim=0, num_chunks=chunks),
        _Parameter(name=prefix + "mlp.linear_fc2.weight", shape=(h, ffn), cut_dim=1),
    ]
    if sizes.biases:
        found += [
            _Parameter(name=prefix + "input_layernorm.bias", shape=(h,), cut_dim=_REPLICATED),
            _Parameter(name=prefix + "self_attention.linear_qkv.bias", shape=(qkv,), cut_dim=0),
            _Parameter(name=prefix + "self_attention.linear_proj.bias", shape=(h,), cut_dim=_REPLICATED),
            _Parameter(name=prefix + "pre_mlp_layernorm.bias", shape=(h,), cut_dim=_REPLICATED),
            _Parameter(name=prefix + "mlp.linear_fc1.bias", shape=(chunks * ffn,), cut_dim=0, num_chunks=chunks),
            _Parameter(name=prefix + "mlp.linear_fc2.bias", shape=(h,), cut_dim=_REPLICATED),
        ]
    if sizes.qk_norm:
        for which in ("q", "k"):
            found.append(
                _Parameter(
                    name=f"{prefix}self_attention.{which}_layernorm.weight",
                    shape=(sizes.head_size,),
                    cut_dim=_REPLICATED,
                    identical_without_sp=False,
                )
            )
    return found


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _cut(
    parameter: _Parameter,
    *,
    tensor: int,
    layer: int | None,
    local_name: str,
    tp: int,
    tp_rank: int,
    partial: bool,
    stage_copy: int = 0,
) -> list[Shard]:
    """The shards of one parameter on tensor-parallel rank ``tp_rank``."""
    lead = () if layer is None else (layer,)
    lead_end = () if layer is None else (layer + 1,)
    lead_strides = () if layer is None else (0,)
    shape, dim = parameter.shape, parameter.cut_dim
    if dim is None or tp == 1:
        copies = dim is None and tp > 1
        return [
            Shard(
                tensor=tensor,
                region=Region(low=lead + (0,) * len(shape), high=lead_end + shape),
                parameter=local_name,
                storage_offset=0,
                strides=lead_strides + _row_major(shape),
                stage_copy=stage_copy,
                tp_copy=tp_rank if copies else 0,
                gradient_class=GradientClass.PARTIAL if partial else GradientClass.IDENTICAL,
            )
        ]
    chunk = shape[dim] // parameter.num_chunks
    if chunk % tp:
        raise ValueError(f"{parameter.name}: dim {dim} of {chunk} elements does not divide by tp {tp}")
    extent = chunk // tp
    local_shape = shape[:dim] + (extent * parameter.num_chunks,) + shape[dim + 1 :]
    strides = _row_major(local_shape)
    shards = []
    for index in range(parameter.num_chunks):
        low = index * chunk + tp_rank * extent
        before, after = (0,) * dim, shape[dim + 1 :]
        shards.append(
            Shard(
                tensor=tensor,
                region=Region(
                    low=lead + before + (low,) + (0,) * len(after),
                    high=lead_end + shape[:dim] + (low + extent,) + after,
                ),
                parameter=local_name,
                storage_offset=index * extent * strides[dim],
                strides=lead_strides + strides,
                stage_copy=stage_copy,
            )
        )
    return shards


def gpt_layout(
    sizes: GPTSizes,
    *,
    tp: int,
    pp: int,
    dp: int,
    sequence_parallel: bool | None = None,
    vocab_divisor: int = 1,
    layers_of_stage: tuple[int, ...] | None = None,
    label: str | None = None,
) -> ShardLayout:
    """The layout of a GPT model of ``sizes`` under ``tp * dp * pp`` ranks.

    Ranks are ordered with tensor parallel innermost, then data parallel, pipeline outermost.
    ``vocab_divisor`` must be the same, and a multiple of every tp, for all strategies of a pool.
    ``layers_of_stage`` gives uneven stages; by default the layers must divide by ``pp``.
    Sequence parallel, on by default where ``tp > 1``, makes the norms' gradients partial.
    Raises ValueError naming the dim that does not divide.
    """
    label = label or f"tp{tp}pp{pp}dp{dp}"
    if layers_of_stage is None:
        if sizes.num_layers % pp:
            raise ValueError(f"layout {label}: {sizes.num_layers} layers do not divide by pp {pp}")
        layers_of_stage = (sizes.num_layers // pp,) * pp
    if len(layers_of_stage) != pp or sum(layers_of_stage) != sizes.num_layers:
        raise ValueError(f"layout {label}: layers_of_stage {layers_of_stage} does not give {sizes.num_layers} layers")
    sequence_parallel = tp > 1 if sequence_parallel is None else sequence_parallel
    vocab = sizes.padded_vocab_size(max(vocab_divisor, 1))
    h = sizes.hidden_size

    first = [_Parameter(name="embedding.word_embeddings.weight", shape=(vocab, h), cut_dim=0)]
    if sizes.num_learned_positions:
        first.append(
            _Parameter(
                name="embedding.position_embeddings.weight",
                shape=(sizes.num_learned_positions, h),
                cut_dim=_REPLICATED,
            )
        )
    middle = _layer_parameters(sizes)
    last = [_Parameter(name="decoder.final_layernorm.weight", shape=(h,), cut_dim=_REPLICATED)]
    if sizes.biases:
        last.append(_Parameter(name="decoder.final_layernorm.bias", shape=(h,), cut_dim=_REPLICATED))
    if not sizes.tied_embeddings:
        last.append(_Parameter(name="output_layer.weight", shape=(vocab, h), cut_dim=0))

    tensors = [TensorSpec(name=p.name, shape=p.shape, dtype=sizes.dtype) for p in first]
    tensors += [TensorSpec(name=p.name, shape=(sizes.num_layers, *p.shape), dtype=sizes.dtype) for p in middle]
    tensors += [TensorSpec(name=p.name, shape=p.shape, dtype=sizes.dtype) for p in last]
    index = {spec.name: i for i, spec in enumerate(tensors)}
    starts = np.cumsum((0, *layers_of_stage))

    def partial(parameter: _Parameter) -> bool:
        return sequence_parallel or not parameter.identical_without_sp

    def holding(stage: int, tp_rank: int) -> Holding:
        found: list[Shard] = []
        common = {"tp": tp, "tp_rank": tp_rank}
        if stage == 0:
            for p in first:
                found += _cut(p, tensor=index[p.name], layer=None, local_name=p.name, partial=partial(p), **common)
        for layer in range(starts[stage], starts[stage + 1]):
            for p in middle:
                local_name = p.name.replace("layers.", f"layers.{layer - starts[stage]}.", 1)
                found += _cut(
                    p, tensor=index[p.name], layer=int(layer), local_name=local_name, partial=partial(p), **common
                )
        if stage == pp - 1:
            for p in last:
                found += _cut(p, tensor=index[p.name], layer=None, local_name=p.name, partial=partial(p), **common)
            if sizes.tied_embeddings and pp > 1:
                found += _cut(
                    first[0],
                    tensor=0,
                    layer=None,
                    local_name="output_layer.weight",
                    partial=True,
                    stage_copy=1,
                    **common,
                )
        return tuple(found)

    holdings = tuple(holding(stage, tp_rank) for stage in range(pp) for tp_rank in range(tp))
    ranks = np.arange(tp * dp * pp)
    stage_of_rank, tp_of_rank = ranks // (tp * dp), ranks % tp
    return ShardLayout(
        label=label,
        tensors=tuple(tensors),
        holdings=holdings,
        holding_of_rank=(stage_of_rank * tp + tp_of_rank).astype(np.int32),
        dp_rank=(ranks // tp % dp).astype(np.int32),
    )
