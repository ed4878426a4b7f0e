"""Megatron-core ``GPTModel`` for a strategy: its configuration, layer spec and construction."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer

from hotspa_plugin import cpu
from hotspa_plugin.config import ModelConfig
from hotspa_plugin.integrations.megatron.attention import VarlenAttention
from hotspa_plugin.integrations.megatron.norm import Norm
from hotspa_plugin.strategy import ModelShape, ParallelStrategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTSpec:
    """A GPT model independent of any parallel strategy. Sizes count elements; ``dropout`` is a probability."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    padded_vocab_size: int
    max_positions: int
    positions: str = "rope"  # or "learned"
    norm: str = "rmsnorm"  # or "layernorm"
    activation: str = "swiglu"  # or "gelu"
    linear_bias: bool = False
    tied_embeddings: bool = False
    qk_layernorm: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    rotary_base: int = 10000

    @classmethod
    def from_config(cls, model: ModelConfig, *, padded_vocab_size: int, max_positions: int) -> GPTSpec:
        """The model of a configuration file, with the vocabulary padded for a pool."""
        same = {field.name for field in dataclasses.fields(cls)} & set(type(model).model_fields)
        values = {name: getattr(model, name) for name in same - {"max_positions"}}
        return cls(**values, padded_vocab_size=padded_vocab_size, max_positions=model.max_positions or max_positions)

    @property
    def shape(self) -> ModelShape:
        """The sizes that strategies are checked against."""
        learned = self.positions == "learned"
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            vocab_size=self.padded_vocab_size,
            gated=self.activation == "swiglu",
            tied_embeddings=self.tied_embeddings,
            learned_positions=learned,
            max_positions=self.max_positions if learned else None,
        )


def transformer_config(spec: GPTSpec, strategy: ParallelStrategy, dtype: torch.dtype) -> TransformerConfig:
    """``spec`` under ``strategy`` as Megatron's own configuration."""
    on_cpu = cpu.is_enabled()
    gated = spec.activation == "swiglu"
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[strategy.recompute]
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.head_dim,
        normalization={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[spec.norm],
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        add_bias_linear=spec.linear_bias,
        qk_layernorm=spec.qk_layernorm,
        hidden_dropout=spec.dropout,
        attention_dropout=spec.dropout,
        init_method_std=spec.init_std,
        tensor_model_parallel_size=strategy.tp,
        pipeline_model_parallel_size=strategy.pp,
        virtual_pipeline_model_parallel_size=strategy.vpp if strategy.vpp > 1 else None,
        sequence_parallel=strategy.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=False,
        use_cpu_initialization=on_cpu,
        # Micro-batches differ in length, so pipeline stages exchange shapes before tensors.
        variable_seq_lengths=True,
        # Megatron asks for this dispatcher where lengths vary, in dense models too.
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=not on_cpu,
        bias_dropout_fusion=not on_cpu,
        masked_softmax_fusion=not on_cpu,
        apply_rope_fusion=False,
        persist_layer_norm=not on_cpu,
        # Ranks without work in a bucket would leave the others waiting in a timer's barrier.
        barrier_with_L1_time=False,
        **recompute,
    )


def layer_spec(spec: GPTSpec, config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """TransformerEngine's layers on CUDA; on CPU Megatron's local ones with our attention and norms."""
    if not cpu.is_enabled():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_layernorm, normalization=config.normalization)
    assert issubclass(layer.module, TransformerLayer)
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = VarlenAttention
    if spec.qk_layernorm:
        attention.q_layernorm = Norm
        attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)


def build_gpt(
    spec: GPTSpec, strategy: ParallelStrategy, dtype: torch.dtype, *, initialize: bool = True
) -> list[GPTModel]:
    """This rank's model chunks under ``strategy``, whose parallel state must be active.

    With ``initialize`` False the parameters hold whatever was in memory.
    """
    config = transformer_config(spec, strategy, dtype)
    config.perform_initialization = initialize
    groups = ProcessGroupCollection.use_mpu_process_groups()
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(spec, config),
        vocab_size=spec.padded_vocab_size,
        max_sequence_length=spec.max_positions,
        pre_process=pp_rank == 0,
        post_process=pp_rank == pp_size - 1,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type={"rope": "rope", "learned": "learned_absolute"}[spec.positions],
        rotary_base=spec.rotary_base,
        parallel_output=True,
        pg_collection=groups,
    )
    if not cpu.is_enabled():
        model.cuda()
    return [model.to(dtype) if dtype is not torch.float32 else model]


def whole_model_name(chunk: GPTModel, name: str) -> str:
    """What a parameter ``name`` of a model chunk is called in a model that is not split over pipeline stages."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # the last stage's own copy
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    layer = chunk.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{layer}.{name[match.end() :]}"


def freeze_parameters(chunk: GPTModel, freeze: Callable[[str], bool]) -> None:
    """Stops training those parameters for whose name (:func:`whole_model_name`) ``freeze`` is true."""
    for name, parameter in chunk.named_parameters():
        if freeze(whole_model_name(chunk, name)):
            parameter.requires_grad = False
    if chunk.pre_process and chunk.config.recompute_granularity == "full":
        # Megatron's recomputed layers pass no gradient to their own parameters unless their input wants one.
        chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
