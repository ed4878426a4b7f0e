"""Draws random cases, most of which fit together."""

from __future__ import annotations

import math
import random
from typing import Any

from hotspa_plugin.fuzz.case import FuzzCase, Kind
from hotspa_plugin.resharding import POLICIES

MISFIT_SHARE = 0.12  # of the cases: one thing in them is made wrong on purpose
_FREEZABLE = ("embedding", "linear_qkv", "mlp", "layernorm", "layers.0.", "output_layer", "linear_proj")
_MISTAKES = ("heads", "groups", "ffn", "layers", "ranks", "home", "bounds", "twice", "length", "positions", "odd")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 23, 31, 41, 53, 67, 89, 113, 127)


def draw_case(kind: Kind, seed: int, number: int, rank_range: tuple[int, int]) -> FuzzCase:
    """Case ``number`` of a campaign, the same every time. ``rank_range`` holds the fewest and the most ranks."""
    draw = random.Random(f"{seed} {kind} {number}")
    num_ranks = _draw_num_ranks(draw, rank_range)
    strategies = _draw_strategies(draw, num_ranks)
    model = _draw_model(draw, strategies)
    bounds = sorted(draw.sample(range(2, 160), len(strategies)))
    pool = [f"{_spell(*strategy)}:{bound}" for strategy, bound in zip(strategies, bounds, strict=True)]
    if model["positions"] == "learned" and draw.random() < 0.3:
        model["max_positions"] = bounds[-1] + draw.randint(0, 9)
    settings: dict[str, Any] = {
        "kind": kind,
        "num_ranks": num_ranks,
        "pool": tuple(pool),
        "home": _spell(*draw.choice(strategies)),
        "model": model,
        "dtype": draw.choices(("fp32", "bf16"), (4, 1))[0],
        "policy": draw.choice(POLICIES),
        "switch_memory_bytes": _draw_budget(draw, model),
        "ranks_per_node": draw.choice((None, None, 1, 2, 3, max(1, num_ranks // 2))),
        "seed": draw.randrange(1 << 16),
    }
    if draw.random() < 0.2:
        settings["frozen"] = tuple(draw.sample(_FREEZABLE, draw.randint(1, 2)))
    if kind == "step":
        settings["packing"] = draw.choice(("packed", "padded"))
        settings["distributed_optimizer"] = draw.random() < 0.3
        settings["lengths"] = tuple(_draw_lengths(draw, bounds) for _ in range(draw.choice((1, 1, 2))))
    if draw.random() < MISFIT_SHARE:
        _spoil(draw, settings, bounds)
    return FuzzCase(**settings)


def _draw_num_ranks(draw: random.Random, rank_range: tuple[int, int]) -> int:
    fewest, most = rank_range
    # Numbers with few divisors have few strategies: half of the draws leave them out.
    rich = [n for n in range(fewest, most + 1) if n in (2, 4, 6, 8) or (n > 8 and n % 4 == 0)]
    return draw.choice(rich) if rich and draw.random() < 0.7 else draw.randint(fewest, most)


def _draw_strategies(draw: random.Random, num_ranks: int) -> list[tuple[int, int, str]]:
    """(tp, pp, suffix) of one to four different strategies that divide the ranks."""
    sizes = [(tp, pp) for tp in (1, 2, 3, 4, 5, 6, 7, 8) for pp in (1, 2, 3, 4, 5, 6, 8) if num_ranks % (tp * pp) == 0]
    found: dict[str, tuple[int, int, str]] = {}
    for _ in range(draw.choice((1, 2, 2, 3, 3, 3, 4))):
        tp, pp = draw.choice(sizes)
        suffix = ("nosp" if tp > 1 and draw.random() < 0.3 else "") + draw.choice(("", "", "", "rc", "rcs"))
        found.setdefault(_spell(tp, pp, suffix), (tp, pp, suffix))
    strategies = list(found.values())
    draw.shuffle(strategies)
    return strategies


def _spell(tp: int, pp: int, suffix: str) -> str:
    sizes = (f"tp{tp}" if tp > 1 else "") + (f"pp{pp}" if pp > 1 else "")
    return (sizes or "tp1") + suffix


def _draw_model(draw: random.Random, strategies: list[tuple[int, int, str]]) -> dict[str, bool | int | str]:
    """A small model that all ``strategies`` can hold."""
    tp = math.lcm(*(tp for tp, _, _ in strategies))
    pp = math.lcm(*(pp for _, pp, _ in strategies))
    heads = tp * draw.choice((1, 1, 2, 3) if tp < 9 else (1,))
    positions = draw.choice(("rope", "learned"))
    head_dim = draw.choice((2, 4, 8, 16) if positions == "rope" else (1, 3, 4, 8))
    groups = draw.choice([g for g in range(1, heads + 1) if _groups_fit(heads, g, head_dim, strategies)])
    return {
        "num_layers": pp * draw.choice((1, 1, 2, 3) if pp < 5 else (1,)),
        "hidden_size": heads * head_dim if draw.random() < 0.7 else draw.choice((8, 12, 20, 36, 56)),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": head_dim,
        "ffn_hidden_size": tp * draw.choice((1, 4, 7, 16)),
        "vocab_size": draw.choice((2, 5, 31, 64, 101, 250, 300)),
        "make_vocab_size_divisible_by": draw.choice((1, 1, 1, 8, 64)),
        "positions": positions,
        "norm": draw.choice(("rmsnorm", "layernorm")),
        "activation": draw.choice(("swiglu", "gelu")),
        "linear_bias": draw.random() < 0.5,
        "qk_layernorm": draw.random() < 0.3,
        "tied_embeddings": draw.random() < 0.5,
    }


def _groups_fit(heads: int, groups: int, head_dim: int, strategies: list[tuple[int, int, str]]) -> bool:
    return heads % groups == 0 and all(
        (groups % tp == 0 or tp % groups == 0) and (heads + 2 * groups) * head_dim % tp == 0 for tp, _, _ in strategies
    )


def _draw_budget(draw: random.Random, model: dict[str, bool | int | str]) -> int | None:
    """Extra memory for a switch: none given, plenty, or so little that it takes many rounds, or none will do."""
    hidden, ffn = int(model["hidden_size"]), int(model["ffn_hidden_size"])
    heads = (int(model["num_attention_heads"]) + int(model["num_query_groups"])) * int(model["head_dim"])
    num_parameters = hidden * (int(model["num_layers"]) * (3 * ffn + 2 * heads) + 2 * int(model["vocab_size"]))
    rounds = draw.choice((None, None, None, 0.5, 4, 30))
    return None if rounds is None else max(1_000, int(4 * num_parameters / rounds))


def _draw_lengths(draw: random.Random, bounds: list[int]) -> tuple[int, ...]:
    """The sequences of one step, in tokens: at most some hundred, of every awkward kind."""
    last = bounds[-1]
    kind = draw.choice(("any", "any", "any", "ones", "primes", "giant", "one bucket", "single", "edges", "many"))
    if kind == "ones":
        return (1,) * draw.randint(1, 9)
    if kind == "primes":
        fitting = [p for p in _PRIMES if p <= last]
        return tuple(draw.choice(fitting) for _ in range(draw.randint(1, 9)))
    if kind == "giant":
        return (*(draw.randint(1, min(6, last)) for _ in range(draw.randint(0, 12))), last)
    if kind == "one bucket":
        index = draw.randrange(len(bounds))
        low = bounds[index - 1] + 1 if index else 1
        return tuple(draw.randint(low, bounds[index]) for _ in range(draw.randint(1, 5)))
    if kind == "single":
        return (draw.randint(1, last),)
    if kind == "edges":
        edges = [length for bound in bounds for length in (bound, bound + 1) if length <= last]
        return tuple(draw.sample(edges, draw.randint(1, len(edges))))
    if kind == "many":
        return tuple(draw.randint(1, min(16, last)) for _ in range(draw.randint(10, 40)))
    return tuple(draw.randint(1, last) for _ in range(draw.randint(1, 8)))


def _spoil(draw: random.Random, settings: dict[str, Any], bounds: list[int]) -> None:
    """Makes one thing wrong, or nearly wrong."""
    model = settings["model"]
    what = draw.choice(_MISTAKES)
    if what == "heads":
        model["num_attention_heads"] += 1
    elif what == "groups":
        model["num_query_groups"] = draw.randint(1, model["num_attention_heads"] + 1)
    elif what == "ffn":
        model["ffn_hidden_size"] += 1
    elif what == "layers":
        model["num_layers"] += 1
    elif what == "ranks":
        settings["num_ranks"] = draw.randint(1, settings["num_ranks"])
    elif what == "home":
        settings["home"] = "tp16"
    elif what == "bounds":
        settings["pool"] = settings["pool"][::-1]
    elif what == "twice":
        settings["pool"] = (*settings["pool"], settings["pool"][0].partition(":")[0] + ":4096")
    elif what == "length" and settings["kind"] == "step":
        settings["lengths"] = (*settings["lengths"], (3, bounds[-1] + draw.randint(1, 50)))
    elif what == "positions":
        model["positions"], model["max_positions"] = "learned", max(1, bounds[-1] - 1)
    elif what == "odd":
        model["head_dim"] = draw.choice((1, 3, 5))
