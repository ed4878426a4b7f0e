"""The ``hotspa`` block of a DeepSpeed configuration."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from hotspa_plugin.data import OverlongPolicy
from hotspa_plugin.search import AUTO
from hotspa_plugin.strategy import StrategyPool

KEY = "hotspa"


class _Block(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class SwitchBlock(_Block):
    """How parameters and gradients move. ``memory_mb`` bounds what a switch needs beside both copies."""

    policy: Literal["balanced", "fcfs", "round_robin", "multi_node_round_robin", "greedy", "new_greedy"] = "balanced"
    memory_mb: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def memory_budget_bytes(self) -> int | None:
        """MB are 2**20 bytes."""
        return None if self.memory_mb is None else int(self.memory_mb * 2**20)


class HotspaBlock(_Block):
    """What ``"hotspa": {...}`` may hold.

    ``pool`` is written as everywhere (``tp1:4096 tp2:16384``), or as a mapping from strategy to bound. ``home`` owns
    the optimizer state (default: the last strategy). ``batch`` says whether ``train_batch`` is given the whole global
    batch on every rank, or a part of it by each, and ``overlong`` what becomes of a sequence over the last bound.
    ``micro_batch_tokens`` caps a strategy's micro-batches (default: its bound).

    ``pool`` may be ``auto``: planned from ``profile`` (of ``hotspa profile``) for sequences of ``lengths`` (as ``hotspa
    plan`` takes them; default: those of ``training_data``) up to ``longest_tokens`` (default: the longest of them) in
    ``memory_limit_gb`` of a rank (10^9 bytes; default: the profile's). ``assignment`` ``batch``, the default then, lets
    each batch's own lengths decide who trains what, in place of the ``bounds``; it needs a profile too.
    """

    enabled: bool = True
    pool: Any  # what StrategyPool.from_config reads, which says better than a type what is wrong
    home: str | None = None
    packing: Literal["packed", "padded"] = "packed"
    batch: Literal["global", "per_rank"] = "global"
    overlong: OverlongPolicy = "error"
    micro_batch_tokens: dict[str, Annotated[int, pydantic.Field(gt=0)]] = {}
    assignment: Literal["bounds", "batch"] | None = None
    profile: str | None = None
    lengths: str | None = None
    longest_tokens: Annotated[int, pydantic.Field(gt=0)] | None = None
    memory_limit_gb: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = None
    switch: SwitchBlock = SwitchBlock()
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 1234

    @property
    def is_auto(self) -> bool:
        return self.pool == AUTO

    @property
    def assigns_per_batch(self) -> bool:
        return (self.assignment or ("batch" if self.is_auto else "bounds")) == "batch"

    @property
    def is_planned(self) -> bool:
        """Whether a profile is needed."""
        return self.is_auto or self.assigns_per_batch

    def check(self) -> None:
        """Raises ValueError for keys that contradict each other."""
        if self.is_planned and self.profile is None:
            raise ValueError(
                f"{KEY}.profile is missing: pool auto and assignment batch need what hotspa profile measured"
            )
        if self.is_auto and (self.home is not None or self.micro_batch_tokens):
            given = "home" if self.home is not None else "micro_batch_tokens"
            raise ValueError(f"{KEY}.{given} is given, but pool auto chooses it: leave it out")
        unused = () if self.is_auto else ("lengths", "longest_tokens")
        for name in unused if self.is_planned else ("profile", "memory_limit_gb", *unused):
            if getattr(self, name) is not None:
                raise ValueError(f"{KEY}.{name} is for pool auto: leave it out")
        if not self.is_auto:
            self.parse_pool()

    def parse_pool(self) -> StrategyPool:
        """The pool, checked as far as it can be without a world size and a model."""
        try:
            pool = StrategyPool.from_config(self.pool, home=self.home)
            bounds = {str(entry.strategy): entry.bound_tokens for entry in pool.entries}
            for label, num_tokens in self.micro_batch_tokens.items():
                if label not in bounds:
                    raise ValueError(f"micro_batch_tokens: strategy {label} is not in the pool {pool}")
                if num_tokens < bounds[label]:
                    raise ValueError(
                        f"micro_batch_tokens: {num_tokens} of {label} cannot hold its longest sequence; "
                        f"use at least its bound, {bounds[label]}"
                    )
        except ValueError as error:
            raise ValueError(f"{KEY}.{error}") from None
        return pool


def read_block(config: Mapping[str, Any]) -> HotspaBlock | None:
    """The enabled ``hotspa`` block of a DeepSpeed configuration, or None where it is absent or not enabled.

    Raises ValueError naming the JSON key, and for a key that is not known the nearest one that is.
    """
    _refuse_misspelt_key(config)
    raw = config.get(KEY)
    if raw is None or (isinstance(raw, Mapping) and raw.get("enabled") is False):
        return None
    if not isinstance(raw, Mapping):
        raise ValueError(
            f'{KEY} is {json.dumps(raw)}, but must be a block such as {{"enabled": true, "pool": "tp1:4096 tp2:16384"}}'
        )
    try:
        block = HotspaBlock.model_validate(dict(raw))
    except pydantic.ValidationError as error:
        raise ValueError(_explain(error.errors()[0])) from None
    block.check()
    return block


def _refuse_misspelt_key(config: Mapping[str, Any]) -> None:
    """DeepSpeed ignores blocks that it does not know, so a misspelt one would train without switching."""
    for key in config:
        folded = str(key).lower().replace("_", "").replace("-", "")
        if key != KEY and (folded.startswith(KEY) or difflib.get_close_matches(folded, [KEY], cutoff=0.8)):
            raise ValueError(f"{key} is not a known key; did you mean {KEY!r}?")


def load_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration as a dict, from a path or a mapping (which is not copied deeply)."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        loaded = json.loads(Path(config).read_text(encoding="utf-8"), object_pairs_hook=_no_repeated_keys)
    except OSError as error:
        raise ValueError(f"DeepSpeed configuration {config}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"DeepSpeed configuration {config}: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"DeepSpeed configuration {config}: holds no JSON object")
    return loaded


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    loaded = dict(pairs)
    if len(loaded) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"DeepSpeed configuration: key {repeated!r} stands twice in one block; keep one of them")
    return loaded


def _explain(error: Mapping[str, Any]) -> str:
    path = [str(part) for part in error["loc"]]
    where = ".".join([KEY, *path])
    if error["type"] == "extra_forbidden":
        model = SwitchBlock if path[:1] == ["switch"] and len(path) > 1 else HotspaBlock
        known = list(model.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        return f"{where} is not a known key; {hint}"
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {json.dumps(error['input'], default=str)}: {error['msg']}"
