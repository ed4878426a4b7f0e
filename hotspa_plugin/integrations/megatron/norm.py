"""Layer norms for the CPU that work under sequence parallel."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> torch.nn.Module:
    """A ``torch.nn`` LayerNorm or RMSNorm over the last dim, of ``hidden_size`` elements.

    Its parameters carry ``sequence_parallel``, by which Megatron knows that under sequence parallel each
    tensor-parallel rank has seen a part of the sequence and the gradients must be summed.
    """
    norm_classes = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    if config.normalization not in norm_classes:
        raise ValueError(f"normalization {config.normalization!r} has no CPU form: use one of {sorted(norm_classes)}")
    if config.layernorm_zero_centered_gamma:
        raise ValueError("layernorm_zero_centered_gamma has no CPU form: leave it off")
    norm = norm_classes[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class Norm:
    """``build_norm`` as the class that Megatron's layer specs ask for."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        return build_norm(config, hidden_size, eps)
