"""Causal attention for Hugging Face models in which no document of a packed micro-batch sees another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import AttentionInterface

NAME = "hotspa"
# What some models pass to their attention and this one does not compute.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Makes ``attn_implementation="hotspa"`` known to transformers; harmless when called again."""
    AttentionInterface.register(NAME, varlen_attention)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    tp_rank: int = 0,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it: ``[b, heads, s, d]`` in, ``[b, s, heads, d]`` out.

    ``segment_lengths`` are those of the documents of one packed row; without them every row is one document,
    padded at its end. ``key`` and ``value`` may have fewer heads.
    """
    if unsupported := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise ValueError(
            f"model {type(module).__name__}: its attention uses {unsupported[0]}, which hot switching does not support"
        )
    assert attention_mask is None, "documents are told apart by their lengths, not by a mask"

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        windowed = sliding_window is not None and length > sliding_window
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v,
            attn_mask=_band(length, sliding_window, q.device) if windowed else None,
            is_causal=not windowed,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip

    with _own_generator(dropout, tp_rank, query.device):
        if segment_lengths is None:
            out = attend(query, key, value)
        else:
            documents = zip(*(x.split(list(segment_lengths), dim=2) for x in (query, key, value)), strict=True)
            out = torch.cat([attend(*document) for document in documents], dim=2)
    return out.transpose(1, 2).contiguous(), None


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where a position may look: at itself and the ``window - 1`` before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


@contextlib.contextmanager
def _own_generator(dropout: float, tp_rank: int, device: torch.device) -> Iterator[None]:
    """Heads are split over tensor parallel, so each rank drops by a generator of its own.

    Its seed is drawn from the default generator, which tensor-parallel peers share, so that the latter stay
    in step and a recomputed forward pass draws the same masks.
    """
    if not dropout:
        yield
        return
    seed = int(torch.randint(2**62, (1,)))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + tp_rank)
        yield
