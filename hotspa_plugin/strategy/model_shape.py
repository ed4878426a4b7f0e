"""The sizes of a transformer that strategies are checked against."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer, free of any parallel strategy.

    ``vocab_size`` counts the rows of the embedding: pass the padded size (see
    ``padded_vocab_size``). ``head_dim`` defaults to ``hidden_size / num_attention_heads`` and
    ``num_query_groups`` to one group per head. ``max_positions`` is the number of rows of a learned
    position embedding; it is required with ``learned_positions`` and otherwise None.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    head_dim: int | None = None
    vocab_size: int
    gated: bool = False  # a SwiGLU-like MLP, whose first matrix holds gate and up halves
    tied_embeddings: bool = False
    learned_positions: bool = False
    max_positions: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model: {name} is {getattr(self, name)}, but must be at least 1")
        heads = self.num_attention_heads
        if self.num_query_groups is None:
            object.__setattr__(self, "num_query_groups", heads)
        if self.num_query_groups < 1 or heads % self.num_query_groups:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"model: num_query_groups {self.num_query_groups} does not divide the {heads} attention heads; "
                f"sizes that fit: {fits}"
            )
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ValueError(
                    f"model: hidden_size {self.hidden_size} is not a multiple of the {heads} attention heads; "
                    "change one of them or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.head_dim < 1:
            raise ValueError(f"model: head_dim is {self.head_dim}, but must be at least 1")
        if self.learned_positions and (self.max_positions is None or self.max_positions < 1):
            raise ValueError("model: learned_positions needs max_positions, the number of positions to learn")
        if not self.learned_positions and self.max_positions is not None:
            raise ValueError(
                f"model: max_positions {self.max_positions} is given without learned_positions; leave it out"
            )

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of the keys (and of the values) of all query groups together."""
        return self.num_query_groups * self.head_dim
