"""The models written out in plain torch, and a training loop around them: no Megatron, no sharding.

Weights are whole tensors by the names that layouts give them; ``linear_qkv`` holds, per query group, the
queries of its heads, then its key and its value.
"""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F

from hotspa_plugin.data import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainSizes:
    """What the formulas need of a ``GPTSpec``."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    rope: bool
    rms: bool
    swiglu: bool
    tied: bool
    rotary_base: int = 10000

    @classmethod
    def of(cls, spec):
        return cls(
            num_layers=spec.num_layers, num_attention_heads=spec.num_attention_heads, head_dim=spec.head_dim,
            num_query_groups=spec.num_query_groups, rope=spec.positions == "rope", rms=spec.norm == "rmsnorm",
            swiglu=spec.activation == "swiglu", tied=spec.tied_embeddings, rotary_base=spec.rotary_base,
        )  # fmt: skip


def loss_sum(weights: dict[str, torch.Tensor], sizes: PlainSizes, sample: Sample) -> torch.Tensor:
    """Sum of the cross entropies of one sequence's targets."""
    tokens, labels = torch.from_numpy(sample.tokens), torch.from_numpy(sample.labels)
    x = weights["embedding.word_embeddings.weight"][tokens]
    if not sizes.rope:
        x = x + weights["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(sizes.num_layers):
        own = {
            name.removeprefix("decoder.layers.").removesuffix(f"[{layer}]"): value
            for name, value in weights.items()
            if name.endswith(f"[{layer}]")
        }
        x = x + _linear(_attention(_norm(x, own, "self_attention.linear_qkv.layer_norm", sizes), own, sizes), own,
                        "self_attention.linear_proj")  # fmt: skip
        x = x + _mlp(_norm(x, own, "mlp.linear_fc1.layer_norm", sizes), own, sizes)
    x = _norm(x, weights, "decoder.final_layernorm", sizes, joint=".")
    logits = x @ weights["embedding.word_embeddings.weight" if sizes.tied else "output_layer.weight"].T
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * torch.from_numpy(sample.loss_mask)).sum()


def _linear(x, weights, name):
    bias = weights.get(f"{name}.bias")
    return F.linear(x, weights[f"{name}.weight"], bias)


def _norm(x, weights, name, sizes, joint="_"):
    if sizes.rms:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{name}{joint}weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return scaled * weights[f"{name}{joint}weight"] + weights[f"{name}{joint}bias"]


def _attention(x, weights, sizes):
    groups, heads, width = sizes.num_query_groups, sizes.num_attention_heads, sizes.head_dim
    per_group = heads // groups
    mixed = _linear(x, weights, "self_attention.linear_qkv").view(len(x), groups, per_group + 2, width)
    query, key, value = mixed[:, :, :per_group], mixed[:, :, per_group], mixed[:, :, per_group + 1]
    if sizes.rope:
        query, key = _rotate(query, sizes), _rotate(key, sizes)
    scores = torch.einsum("qghd,kgd->ghqk", query, key) / math.sqrt(width)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights_of_keys = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("ghqk,kgd->qghd", weights_of_keys, value).reshape(len(x), heads * width)


def _rotate(x, sizes):
    """Rotary position embedding, halves paired (Su et al., arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    frequencies = sizes.rotary_base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * frequencies
    angles = angles.view(len(x), *(1,) * (x.dim() - 2), half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def _mlp(x, weights, sizes):
    hidden = _linear(x, weights, "mlp.linear_fc1")
    if sizes.swiglu:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
    else:
        hidden = F.gelu(hidden)
    return _linear(hidden, weights, "mlp.linear_fc2")


def key_bias_rows(sizes: PlainSizes) -> torch.Tensor:
    """Mask over ``linear_qkv``'s rows of those that give keys."""
    per_group = sizes.num_attention_heads // sizes.num_query_groups + 2
    kind = torch.arange(sizes.num_query_groups * per_group * sizes.head_dim) // sizes.head_dim % per_group
    return kind == per_group - 2


def gradients(
    weights: dict[str, torch.Tensor], sizes: PlainSizes, samples: list[Sample]
) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean loss over all targets, its gradient by name), in the dtype of ``weights``."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
    num_targets = sum(int(sample.loss_mask.sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        loss = loss_sum(leaves, sizes, sample) / max(num_targets, 1)
        loss.backward()
        total += loss.item()
    return total, {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}


def train(
    weights: dict[str, torch.Tensor],
    sizes: PlainSizes,
    batches: list[list[Sample]],
    *,
    learning_rates: list[float],
    clip_grad: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Steps of AdamW after clipping. Returns (losses, gradient norms before clipping, final weights).

    One-dimensional parameters are not decayed.
    """
    parameters = {name: torch.nn.Parameter(value.detach().clone()) for name, value in weights.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=learning_rates[0],
        betas=betas,
        eps=eps,
    )
    losses, norms = [], []
    for batch, learning_rate in zip(batches, learning_rates, strict=True):
        loss, grads = gradients({name: p.data for name, p in parameters.items()}, sizes, batch)
        for name, parameter in parameters.items():
            parameter.grad = grads[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), clip_grad)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        losses.append(loss)
    return losses, norms, {name: p.data for name, p in parameters.items()}


def random_samples(lengths, vocab_size: int, seed: int = 0) -> list[Sample]:
    generator = np.random.RandomState(seed)
    return [Sample.from_tokens(generator.randint(0, vocab_size, size=length)) for length in lengths]
