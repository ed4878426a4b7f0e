"""Variable-length causal attention for the CPU: each document of a packed micro-batch sees itself only."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


class VarlenAttention(MegatronModule):
    """A ``core_attention`` built on ``torch.nn.functional.scaled_dot_product_attention``.

    Takes query, key and value as ``[tokens, heads, head_dim]`` with packed sequence parameters, or as
    ``[sequence, batch, heads, head_dim]`` without. Key and value may have fewer heads (query groups).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("attention on CPU has no context parallel: use cp 1")
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError("attention on CPU has neither sliding windows nor softmax offsets")
        head_dim = config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Returns ``[tokens, heads * head_dim]`` packed, else ``[sequence, batch, heads * head_dim]``."""
        if attention_bias is not None:
            raise ValueError("attention on CPU takes no attention bias")
        attend = functools.partial(_attend, scale=self.softmax_scale, dropout=self.dropout if self.training else 0.0)
        with dropout_generator(self.config, self.dropout if self.training else 0.0):
            if packed_seq_params is None:
                return attend(query, key, value).flatten(2)
            return attend_documents(attend, query, key, value, packed_seq_params)


def attend_documents(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_seq_params: PackedSeqParams,
) -> torch.Tensor:
    """``attend`` over each document alone, ``[tokens, heads, head_dim]``; returns ``[tokens, heads * head_dim]``."""
    lengths = torch.diff(packed_seq_params.cu_seqlens_q).tolist()
    documents = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([attend(q[:, None], k[:, None], v[:, None]) for q, k, v in documents]).flatten(1)


def packed_attention(
    module: MegatronModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_seq_params: PackedSeqParams,
) -> torch.Tensor:
    """What Megatron's local ``DotProductAttention`` ``module`` would give, were it to take packed sequences."""
    dropout = module.attention_dropout.p if module.training else 0.0
    attend = functools.partial(_attend, scale=module.softmax_scale, dropout=dropout)
    with dropout_generator(module.config, dropout):
        return attend_documents(attend, query, key, value, packed_seq_params)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, dropout: float
) -> torch.Tensor:
    """Causal attention. ``[s, b, heads, d]`` each; returns the same shape as ``query``."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.permute(2, 0, 1, 3)


def dropout_generator(config: TransformerConfig, dropout: float) -> contextlib.AbstractContextManager:
    """Heads are split over tensor parallel, so their dropout masks come from the per-rank generator."""
    if dropout and not config.sequence_parallel:
        return tensor_parallel.get_cuda_rng_tracker().fork()
    return contextlib.nullcontext()
