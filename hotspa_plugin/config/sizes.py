"""From a model's configuration to the sizes that a profile holds."""

from __future__ import annotations

import math

from hotspa_plugin.config.model import ModelConfig
from hotspa_plugin.cost import ModelSizes
from hotspa_plugin.strategy.parallel_strategy import divisors

BYTE_VOCAB_SIZE = 256


def model_sizes(
    config: ModelConfig, *, num_ranks: int, max_positions: int, dtype: str, vocab_size: int = BYTE_VOCAB_SIZE
) -> ModelSizes:
    """Sizes for planning on so many ranks; ``dtype`` is ``fp32`` or ``bf16``.

    ``vocab_size`` is the tokenizer's, taken where the model has none of its own, and padded so that every tp that fits
    heads and ranks divides it.
    """
    sizes = [tp for tp in divisors(config.num_attention_heads) if num_ranks % tp == 0]
    multiple = config.make_vocab_size_divisible_by * math.lcm(*sizes)
    learned = config.positions == "learned"
    return ModelSizes(
        name=config.name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        head_dim=config.head_dim,
        vocab_size=math.ceil((config.vocab_size or vocab_size) / multiple) * multiple,
        gated_mlp=config.activation == "swiglu",
        tied_embeddings=config.tied_embeddings,
        num_learned_positions=(config.max_positions or max_positions) if learned else 0,
        biases=config.linear_bias,
        qk_norm=config.qk_layernorm,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
    )
