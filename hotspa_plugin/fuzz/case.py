"""One random case, as JSON can hold it, and what must become of it."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import pydantic

from hotspa_plugin.config import ModelConfig
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool

Kind = Literal["switch", "step"]


class FuzzCase(pydantic.BaseModel):
    """A model, a pool and batches.

    ``switch``: parameters and gradients of all ranks move in one process. ``step``: ranks train over gloo. Nothing
    here needs to fit together: see :func:`misfit`. ``pool`` holds entries such as ``tp2:64``; ``lengths`` are tokens,
    a tuple per step; ``switch_memory_bytes`` bounds the extra memory of a switch (None: no bound).
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    num_ranks: int
    pool: tuple[str, ...]
    home: str
    model: dict[str, bool | int | str]
    dtype: Literal["fp32", "bf16"] = "fp32"
    packing: Literal["packed", "padded"] = "packed"
    distributed_optimizer: bool = False
    policy: str = "balanced"
    switch_memory_bytes: int | None = None
    ranks_per_node: int | None = None
    frozen: tuple[str, ...] = ()  # parameters whose name contains one of these are not trained
    lengths: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    @property
    def replay_command(self) -> str:
        """The command that runs this case alone."""
        return "hotspa fuzz --replay " + shlex.quote(self.model_dump_json(exclude_defaults=True))


def check_at_start(case: FuzzCase) -> tuple[StrategyPool, ModelConfig]:
    """What every command checks before ranks are started; raises ValueError for what does not fit."""
    model = ModelConfig.model_validate(case.model)
    pool = StrategyPool.parse(" ".join(case.pool), home=case.home)
    return model.check_pool(pool, num_ranks=case.num_ranks, vocab_size=model.vocab_size or 1), model


def misfit(case: FuzzCase) -> str | None:
    """What keeps ``case`` from running, by plain arithmetic that shares nothing with the checks under test."""
    model = case.model
    heads, groups = int(model["num_attention_heads"]), int(model["num_query_groups"])
    if heads % groups:
        return f"{groups} query groups, {heads} heads"
    if model["positions"] == "rope" and int(model["head_dim"]) % 2:
        return f"rotary positions turn pairs, head_dim is {model['head_dim']}"
    names, bounds = zip(*(entry.split(":") for entry in case.pool), strict=True)
    bounds = [int(bound) for bound in bounds]
    if len(set(names)) != len(names):
        return "a strategy stands twice"
    if any(low >= high for low, high in zip([0, *bounds], bounds, strict=False)):
        return "bounds do not ascend"
    if case.home not in names:
        return f"home {case.home} is not in the pool"
    for name in names:
        strategy = ParallelStrategy.parse(name)
        tp, pp = strategy.tp, strategy.pp
        if case.num_ranks % (tp * pp):
            return f"{name} on {case.num_ranks} ranks"
        if heads % tp or (groups % tp and tp % groups):
            return f"tp {tp}, {heads} heads in {groups} groups"
        if (heads + 2 * groups) * int(model["head_dim"]) % tp:
            return f"tp {tp}, {heads} heads in {groups} groups of {model['head_dim']}"
        if int(model["ffn_hidden_size"]) % tp or int(model["num_layers"]) % pp:
            return f"{name}, ffn {model['ffn_hidden_size']}, {model['num_layers']} layers"
        if strategy.sp and tp == 1:
            return "sequence parallelism without tp"
    if model["positions"] == "learned" and int(model.get("max_positions", bounds[-1])) < bounds[-1]:
        return f"{model['max_positions']} positions, bound {bounds[-1]}"
    longest = max((length for step in case.lengths for length in step), default=0)
    if longest > bounds[-1]:
        return f"length {longest}, last bound {bounds[-1]}"
    return None


def may_lack_memory(case: FuzzCase) -> bool:
    """Whether the memory bound is so tight that a row of a tensor may not fit into it."""
    if case.switch_memory_bytes is None:
        return False
    model = case.model
    rows = [int(model["hidden_size"]), int(model["ffn_hidden_size"])]
    rows.append(int(model["num_attention_heads"]) * int(model["head_dim"]))
    # Parts of a message are aligned, and a row may be held for sending and for receiving, local or not.
    return case.switch_memory_bytes < 8 * 4 * max(rows) + 4096


def describe(case: FuzzCase) -> dict[str, Any]:
    """The settings by which a campaign is summed up."""
    strategies = [ParallelStrategy.parse(entry.partition(":")[0]) for entry in case.pool]
    return {
        "ranks": case.num_ranks,
        "strategies": len(strategies),
        "largest tp": max(s.tp for s in strategies),
        "largest pp": max(s.pp for s in strategies),
        "dtype": case.dtype,
        "packing": case.packing if case.kind == "step" else None,
        "policy": case.policy,
        "memory bound": case.switch_memory_bytes is not None,
        "several nodes": case.ranks_per_node is not None,
        "frozen": bool(case.frozen),
        "tied": case.model["tied_embeddings"],
        "distributed optimizer": case.distributed_optimizer if case.kind == "step" else None,
    }
