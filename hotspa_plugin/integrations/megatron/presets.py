"""Small models with a name, for demos, checks and tests."""

from __future__ import annotations

from hotspa_plugin.strategy import ModelShape

from hotspa_plugin.integrations.megatron.gpt import GPTSpec

_TINY = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}

PRESETS: dict[str, dict] = {
    "tiny-gpt": {
        **_TINY, "ffn_hidden_size": 256, "num_query_groups": 8, "positions": "learned", "norm": "layernorm",
        "activation": "gelu", "linear_bias": True, "tied_embeddings": True,
    },
    "tiny-llama": {
        **_TINY, "ffn_hidden_size": 192, "num_query_groups": 4, "positions": "rope", "norm": "rmsnorm",
        "activation": "swiglu", "linear_bias": False, "tied_embeddings": False,
    },
}  # fmt: skip


def preset(name: str, *, padded_vocab_size: int, max_positions: int, **changes) -> GPTSpec:
    """The model called ``name``, with ``changes`` to its fields. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"model {name!r} is unknown: choose one of {', '.join(PRESETS)}")
    return GPTSpec(padded_vocab_size=padded_vocab_size, max_positions=max_positions, **{**PRESETS[name], **changes})


def shape_of(spec: GPTSpec) -> ModelShape:
    """The sizes that strategies are checked against."""
    learned = spec.positions == "learned"
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        vocab_size=spec.padded_vocab_size,
        gated=spec.activation == "swiglu",
        tied_embeddings=spec.tied_embeddings,
        learned_positions=learned,
        max_positions=spec.max_positions if learned else None,
    )
