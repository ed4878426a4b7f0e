"""Makes a failing case smaller, one change after the other, as long as it fails the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from hotspa_plugin.fuzz.case import FuzzCase

# The plainest value of each setting; a failing case that keeps another needs it.
_PLAIN = {
    "dtype": "fp32",
    "packing": "packed",
    "distributed_optimizer": False,
    "policy": "balanced",
    "switch_memory_bytes": None,
    "ranks_per_node": None,
    "frozen": (),
    "seed": 0,
}
_PLAIN_MODEL = {
    "norm": "rmsnorm",
    "activation": "gelu",
    "linear_bias": False,
    "qk_layernorm": False,
    "tied_embeddings": False,
    "positions": "rope",
    "make_vocab_size_divisible_by": 1,
}
_SIZES = (
    "num_layers", "ffn_hidden_size", "vocab_size", "num_attention_heads", "num_query_groups", "head_dim", "hidden_size",
)  # fmt: skip


def shrink(
    case: FuzzCase, still_fails: Callable[[FuzzCase], bool], *, max_tries: int = 200, limit_s: float = 300.0
) -> FuzzCase:
    """The smallest case found by greedy changes for which ``still_fails`` is true; tries each case once."""
    tried = {case.model_dump_json()}
    deadline_s = time.monotonic() + limit_s
    found = True
    while found:
        found = False
        for smaller in simpler(case):
            if (said := smaller.model_dump_json()) in tried:
                continue
            if len(tried) > max_tries or time.monotonic() > deadline_s:
                return case
            tried.add(said)
            if still_fails(smaller):
                case, found = smaller, True
                break
    return case


def simpler(case: FuzzCase) -> Iterator[FuzzCase]:
    """Cases that are one step simpler, the boldest steps first."""
    for lengths in _fewer_lengths(case.lengths):
        yield case.model_copy(update={"lengths": lengths})
    for index, entry in enumerate(case.pool):
        if len(case.pool) > 1 and entry.partition(":")[0] != case.home:
            yield case.model_copy(update={"pool": case.pool[:index] + case.pool[index + 1 :]})
    for num_ranks in (n for n in range(1, case.num_ranks) if case.num_ranks % n == 0):
        yield case.model_copy(update={"num_ranks": num_ranks})
    for name, value in _PLAIN.items():
        if getattr(case, name) != value:
            yield case.model_copy(update={name: value})
    for name, value in _PLAIN_MODEL.items():
        if case.model[name] != value:
            model = {**case.model, name: value}
            if value == "rope":
                model.pop("max_positions", None)
            yield case.model_copy(update={"model": model})
    for name in _SIZES:
        for size in _smaller_sizes(int(case.model[name])):
            yield case.model_copy(update={"model": {**case.model, name: size}})


def _fewer_lengths(lengths: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    for index, step in enumerate(lengths):
        before, after = lengths[:index], lengths[index + 1 :]
        if len(lengths) > 1:
            yield before + after
        if len(step) > 2:
            half = len(step) // 2
            yield (*before, step[:half], *after)
            yield (*before, step[half:], *after)
        if len(step) > 1:
            for dropped in range(len(step)):
                yield (*before, step[:dropped] + step[dropped + 1 :], *after)
        for position, length in enumerate(step):
            for smaller in _smaller_sizes(length):
                yield (*before, (*step[:position], smaller, *step[position + 1 :]), *after)


def _smaller_sizes(size: int) -> Iterator[int]:
    """1, a half, and one less."""
    yield from dict.fromkeys(n for n in (1, size // 2, size - 1) if 1 <= n < size)
