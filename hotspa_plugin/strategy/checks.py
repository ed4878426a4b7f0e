"""Whether one strategy can hold one model, and the padded vocabulary that all strategies can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hotspa_plugin.strategy.model_shape import ModelShape
from hotspa_plugin.strategy.parallel_strategy import ParallelStrategy, divisors


def check_model(strategy: ParallelStrategy, model: ModelShape, *, split_query_groups: bool = True) -> None:
    """Raises ValueError, naming the sizes that fit, where ``strategy`` cannot split ``model`` evenly.

    With ``split_query_groups`` one query group may be spread over several tensor-parallel ranks (tp a
    multiple of the number of groups), as Megatron-core allows; without it every rank must hold
    whole groups.
    """
    tp, pp = strategy.tp, strategy.pp
    misfit = _tensor_parallel_misfit(tp, model, split_query_groups)
    if misfit is not None:
        sizes = [
            size
            for size in divisors(model.num_attention_heads)
            if _tensor_parallel_misfit(size, model, split_query_groups) is None
        ]
        raise ValueError(f"strategy {strategy}: tp {tp} {misfit}; tp sizes that fit this model: {_listed(sizes)}")
    if model.vocab_size % tp:
        padded = math.ceil(model.vocab_size / tp) * tp
        raise ValueError(
            f"strategy {strategy}: tp {tp} does not divide the vocabulary of {model.vocab_size}; pad it to {padded}, "
            "or to one size for the whole pool (padded_vocab_size)"
        )
    chunks = pp * strategy.vpp
    if model.num_layers % chunks:
        if strategy.vpp > 1:
            fits = [size for size in divisors(model.num_layers) if size % pp == 0]
            advice = f"pp*vpp sizes that fit with pp {pp}: {_listed(fits) if fits else 'none'}"
        else:
            advice = f"pp sizes that fit: {_listed(divisors(model.num_layers))}"
        raise ValueError(
            f"strategy {strategy}: {chunks} pipeline {'chunks' if strategy.vpp > 1 else 'stages'} do not split the "
            f"{model.num_layers} layers (num_layers) evenly; {advice}"
        )


def padded_vocab_size(vocab_size: int, divisible_by: int, strategies: Iterable[ParallelStrategy]) -> int:
    """The smallest vocabulary that every strategy (or a whole pool) can hold, in rows.

    Megatron pads to a multiple of ``divisible_by * tp`` for the one tp it knows. Padded rows enter the softmax,
    so runs that are compared, and strategies of one pool, need one size: here a multiple of
    ``divisible_by * tp`` for every tp of the pool.
    """
    if vocab_size < 1 or divisible_by < 1:
        raise ValueError(f"vocabulary of {vocab_size} divisible by {divisible_by}: both must be at least 1")
    multiple = divisible_by * math.lcm(*(strategy.tp for strategy in strategies))
    return math.ceil(vocab_size / multiple) * multiple


def _tensor_parallel_misfit(tp: int, model: ModelShape, split_query_groups: bool) -> str | None:
    """What keeps ``tp`` from splitting ``model``, the vocabulary aside (that can be padded); None if nothing does."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % tp:
        return f"does not divide the {heads} attention heads (num_attention_heads)"
    if groups % tp and not (split_query_groups and tp % groups == 0):
        rule = "neither divides nor is a multiple of" if split_query_groups else "does not divide"
        return f"{rule} the {groups} query groups (num_query_groups)"
    if (rows := model.query_size + 2 * model.key_value_size) % tp:
        sizes = f"num_query_groups {groups}, head_dim {model.head_dim}"
        return f"does not divide the {rows} rows of queries, keys and values ({sizes})"
    if model.ffn_hidden_size % tp:
        return f"does not divide the {model.ffn_hidden_size} columns of the MLP (ffn_hidden_size)"
    return None


def _listed(sizes: list[int], most: int = 16) -> str:
    return ", ".join(map(str, sizes[:most])) + (", ..." if len(sizes) > most else "")
