"""The model section: a preset, sizes of one's own, or a preset with some sizes changed."""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic

from hotspa_plugin.config.fields import Count, Fraction, Positive, Section
from hotspa_plugin.strategy import ModelShape, StrategyPool, padded_vocab_size

_TINY = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 8}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-gpt": {
        **_TINY,
        "ffn_hidden_size": 512,
        "positions": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "linear_bias": True,
        "tied_embeddings": True,
    },
    "tiny-llama": {
        **_TINY,
        "ffn_hidden_size": 384,
        "num_query_groups": 4,
        "positions": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "linear_bias": False,
        "tied_embeddings": False,
    },
}
DEFAULT_PRESET = "tiny-llama"
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
# A preset's value that must not outlive a change of the size that it follows from.
_FOLLOWS = {"ffn_hidden_size": "hidden_size", "num_query_groups": "num_attention_heads"}


class ModelConfig(Section):
    """A decoder-only transformer. Sizes count elements.

    With ``preset`` its values are the defaults of all fields; without, the layers, hidden size and heads
    must be given, and a section that gives none of them is ``tiny-llama``. A built ``ModelConfig`` holds
    concrete values except ``vocab_size``, where None stands for the tokenizer's, and ``max_positions``,
    where None stands for the pool's last bound.
    """

    preset: Literal["tiny-gpt", "tiny-llama"] | None = None
    num_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count
    head_dim: Count
    ffn_hidden_size: Count
    vocab_size: Count | None = None
    make_vocab_size_divisible_by: Count = 1
    max_positions: Count | None = None
    positions: Literal["rope", "learned"] = "rope"
    rotary_base: Count = 10000
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    linear_bias: bool = False
    qk_layernorm: bool = False
    tied_embeddings: bool = False
    dropout: Fraction = 0.0
    init_std: Positive = 0.02

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if given is None:
            given = {}
        if not isinstance(given, dict):
            return given
        values = {key: value for key, value in given.items() if value is not None}
        if not any(size in values for size in _SIZES):
            values.setdefault("preset", DEFAULT_PRESET)
        preset = values.get("preset")
        if isinstance(preset, str):
            own = set(values)
            # An unknown preset is refused by its own field, and should not look like missing sizes as well.
            for key, value in PRESETS.get(preset, PRESETS[DEFAULT_PRESET]).items():
                if _FOLLOWS.get(key) not in own:
                    values.setdefault(key, value)
        missing = [size for size in _SIZES if size not in values]
        if missing and preset is None:
            raise ValueError(
                f"{', '.join(missing)} missing: give them, or start from a preset such as {DEFAULT_PRESET}"
            )
        return _derive(values)

    @pydantic.model_validator(mode="after")
    def _check(self) -> ModelConfig:
        self.shape(vocab_size=self.vocab_size or 1, max_positions=self.max_positions or 1)
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} is odd, but positions rope turn pairs of elements: make it even, or set "
                "positions: learned"
            )
        if self.max_positions is not None and self.positions != "learned":
            raise ValueError(
                f"max_positions {self.max_positions} is for learned positions only: leave it out with rope"
            )
        return self

    @property
    def name(self) -> str:
        """For tables and records: the preset's name where nothing in it was changed, else the sizes too."""
        sizes = f"{self.num_layers} layers of {self.hidden_size}"
        if self.preset is None:
            return sizes
        unchanged = all(getattr(self, key) == value for key, value in PRESETS[self.preset].items())
        return self.preset if unchanged else f"{self.preset} ({sizes})"

    def shape(self, *, vocab_size: int, max_positions: int) -> ModelShape:
        """The sizes that strategies are checked against. ``vocab_size`` counts padded rows."""
        learned = self.positions == "learned"
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            vocab_size=vocab_size,
            gated=self.activation == "swiglu",
            tied_embeddings=self.tied_embeddings,
            learned_positions=learned,
            max_positions=max_positions if learned else None,
        )

    def check_pool(self, pool: StrategyPool, *, num_ranks: int, vocab_size: int) -> StrategyPool:
        """``pool`` resolved for ``num_ranks`` and checked against this model.

        ``vocab_size`` is the tokenizer's; where the model has its own it must be at least that.
        Raises ValueError naming what does not fit and what would.
        """
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ValueError(
                f"model.vocab_size {self.vocab_size} is below the tokenizer's {vocab_size} tokens: "
                f"raise it to {vocab_size}, or leave it out"
            )
        rows = padded_vocab_size(self.vocab_size or vocab_size, self.make_vocab_size_divisible_by, pool)
        shape = self.shape(vocab_size=rows, max_positions=self.max_positions or pool.bounds_tokens[-1])
        return pool.check(world_size=num_ranks, model=shape)


def _derive(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in sizes that follow from others; leaves what is not a number for the fields to refuse."""
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if _is_count(heads):
        values.setdefault("num_query_groups", heads)
        if _is_count(hidden) and "head_dim" not in values:
            if hidden % heads:
                raise ValueError(
                    f"hidden_size {hidden} is not a multiple of the {heads} attention heads (num_attention_heads): "
                    "change one of them or give head_dim"
                )
            values["head_dim"] = hidden // heads
    if _is_count(hidden):
        # Three matrices in place of two: with 8/3 the gated MLP has as many parameters as the plain one with 4.
        gated = values.get("activation", "swiglu") == "swiglu"
        values.setdefault("ffn_hidden_size", math.ceil(hidden * 8 / 3 / 64) * 64 if gated else 4 * hidden)
    return values


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
