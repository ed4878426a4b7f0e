"""What the tensor-parallel copies of a Megatron parameter hold after the backward pass."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from hotspa_plugin.layout import GradientClass


def gradient_class(name: str, parameter: torch.nn.Parameter, config: TransformerConfig) -> GradientClass:
    """The class of ``parameter`` where it is replicated along tensor parallel.

    This is the rule by which ``megatron.core.distributed.finalize_model_grads`` decides what to sum over
    tensor parallel (megatron-core 0.16 to 0.19): parameters marked ``sequence_parallel`` while it is on, and
    query/key layer norms, by name.
    """
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise ValueError(
            f"parameter {name} averages its gradient over tensor parallel "
            "(average_gradients_across_tp_domain), which cannot be hot-switched exactly: turn that off"
        )
    marked = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    qk_norm = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return GradientClass.PARTIAL if marked or qk_norm else GradientClass.IDENTICAL
