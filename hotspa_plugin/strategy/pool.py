"""A pool: the ordered strategies that share one optimizer step, each with its length bound."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator

import pydantic

from hotspa_plugin.strategy.checks import check_model
from hotspa_plugin.strategy.model_shape import ModelShape
from hotspa_plugin.strategy.parallel_strategy import ParallelStrategy, refuse_unsupported

_FORM = "write entries such as tp1:4096 tp2pp2:16384"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """One strategy and the longest sequence, in tokens, that runs under it."""

    strategy: ParallelStrategy
    bound_tokens: int

    def __str__(self) -> str:
        return f"{self.strategy}:{self.bound_tokens}"

    @classmethod
    def parse(cls, spec: str) -> PoolEntry:
        """Reads ``tp2pp2:16384``."""
        strategy, colon, bound = spec.partition(":")
        if not colon:
            raise ValueError(f"{spec!r} lacks a length bound; {_FORM}")
        if not re.fullmatch(r"\d+", bound):
            raise ValueError(f"bound {bound!r} of {strategy!r} is not a number of tokens; {_FORM}")
        return cls(strategy=ParallelStrategy.parse(strategy), bound_tokens=int(bound))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyPool:
    """Strategies with ascending length bounds; ``home`` owns the optimizer state.

    A sequence runs under the first entry whose bound is at least its length. Building a pool checks
    what needs no context (at least one entry, bounds, duplicates, home); ``check`` does the rest.
    """

    entries: tuple[PoolEntry, ...]
    home: ParallelStrategy | None = None  # the last entry's strategy where not given

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError(f"pool: it has no entry; {_FORM}")
        seen: dict[str, PoolEntry] = {}
        previous = 0
        for entry in self.entries:
            name = str(entry.strategy)
            if name in seen:
                raise ValueError(
                    f"pool: strategy {name} stands twice, with bounds {seen[name].bound_tokens} and "
                    f"{entry.bound_tokens}; keep one of them"
                )
            if entry.bound_tokens < 1:
                raise ValueError(f"pool: the bound of {name} is {entry.bound_tokens}, but must be at least 1 token")
            if entry.bound_tokens <= previous:
                raise ValueError(
                    f"pool: bound {entry.bound_tokens} of {name} is not above the bound {previous} before it; "
                    "order the entries by ascending bound"
                )
            seen[name], previous = entry, entry.bound_tokens
        home = self.entries[-1].strategy if self.home is None else self.home
        if str(home) not in seen:
            raise ValueError(f"pool: home {home} is not in it; add it or use one of {', '.join(seen)}")
        # One object for one strategy: an unresolved home takes its entry's dp.
        entry_home = seen[str(home)].strategy
        if home.dp not in (None, entry_home.dp):
            given = "none" if entry_home.dp is None else f"dp{entry_home.dp}"
            raise ValueError(f"pool: home {home} says dp{home.dp}, its entry {given}; leave dp out of home")
        object.__setattr__(self, "home", entry_home)

    @classmethod
    def parse(cls, spec: str, home: str | ParallelStrategy | None = None) -> StrategyPool:
        """Reads ``tp1:4096 tp2pp2:16384 tp4pp2:32768``; entries may also be parted by commas.

        Raises ValueError naming the entry and its position (in characters, from 1).
        """
        entries = []
        for match in re.finditer(r"[^\s,]+", spec):
            try:
                entries.append(PoolEntry.parse(match[0]))
            except ValueError as error:
                raise ValueError(f"pool: entry at character {match.start() + 1}: {error}") from None
        return cls(entries=tuple(entries), home=_as_home(home))

    @classmethod
    def from_config(cls, config: object, home: str | ParallelStrategy | None = None) -> StrategyPool:
        """Reads a pool from what a YAML file may hold.

        Accepts the text that ``parse`` reads; a list of such entries or of mappings with
        ``strategy`` and ``bound_tokens``; a mapping from strategy to bound; or a mapping with
        ``entries`` (any of these) and, if wanted, ``home``.
        """
        if isinstance(config, dict) and "entries" in config:
            unknown = sorted(map(str, set(config) - {"entries", "home"}))
            if unknown:
                raise ValueError(f"pool: unknown key {unknown[0]!r}; known are entries and home")
            return cls.from_config(config["entries"], home=home if home is not None else config.get("home"))
        if isinstance(config, str):
            return cls.parse(config, home=home)
        if isinstance(config, dict):
            config = [{"strategy": strategy, "bound_tokens": bound} for strategy, bound in config.items()]
        if not isinstance(config, list):
            raise ValueError(f"pool: {config!r} is neither text, list nor mapping; {_FORM}")
        entries = []
        for number, item in enumerate(config, start=1):
            try:
                entries.append(_entry_from_config(item))
            except ValueError as error:
                raise ValueError(f"pool: entry {number}: {error}") from None
        return cls(entries=tuple(entries), home=_as_home(home))

    def __str__(self) -> str:
        """The entries as ``parse`` reads them; home is written apart."""
        return " ".join(map(str, self.entries))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[ParallelStrategy]:
        return (entry.strategy for entry in self.entries)

    @property
    def strategies(self) -> tuple[ParallelStrategy, ...]:
        return tuple(self)

    @property
    def bounds_tokens(self) -> tuple[int, ...]:
        return tuple(entry.bound_tokens for entry in self.entries)

    @property
    def home_index(self) -> int:
        return self.strategies.index(self.home)

    def index_of(self, strategy: ParallelStrategy | str) -> int:
        """The position of a strategy, by its name; ValueError where it is not in the pool."""
        names = [str(s) for s in self]
        name = str(ParallelStrategy.parse(strategy)) if isinstance(strategy, str) else str(strategy)
        if name not in names:
            raise ValueError(f"pool: strategy {name} is not in it; it holds {', '.join(names)}")
        return names.index(name)

    def check(
        self,
        *,
        world_size: int,
        model: ModelShape | None = None,
        split_query_groups: bool = True,
        interleaved: bool = False,
    ) -> StrategyPool:
        """This pool with every dp resolved for ``world_size`` ranks.

        Raises ValueError, naming value and way out, where a strategy is unsupported, does not fit the
        ranks, or cannot hold ``model`` (see ``check_model``), or where learned positions end
        below the last bound. ``interleaved`` admits interleaved pipelines (vpp).
        """
        entries = []
        for entry in self.entries:
            refuse_unsupported(entry.strategy, interleaved=interleaved)
        self._check_world_size(world_size)
        for entry in self.entries:
            entries.append(dataclasses.replace(entry, strategy=entry.strategy.resolve(world_size)))
            if model is not None:
                check_model(entry.strategy, model, split_query_groups=split_query_groups)
        last_bound = self.entries[-1].bound_tokens
        if model is not None and model.learned_positions and last_bound > model.max_positions:
            raise ValueError(
                f"pool: bound {last_bound} of {self.entries[-1].strategy} is over the {model.max_positions} positions "
                "that the model learns (max_positions); lower the bound or learn more positions"
            )
        return StrategyPool(entries=tuple(entries), home=self.home.resolve(world_size))

    def _check_world_size(self, world_size: int) -> None:
        """Names the numbers of ranks that fit *all* strategies, where more than one decides."""
        together = math.lcm(*(strategy.num_ranks_per_replica for strategy in self.strategies))
        misfits = [s for s in self.strategies if world_size % s.num_ranks_per_replica]
        if len(self.entries) > 1 and misfits and world_size >= 1:
            below = world_size // together * together
            fits = " or ".join(str(size) for size in (below, below + together) if size)
            first = misfits[0]
            raise ValueError(
                f"pool: strategy {first}: tp*pp*cp = {first.num_ranks_per_replica} does not divide the world size "
                f"{world_size}; for the whole pool use {fits} ranks, or choose another strategy"
            )

    def digest(self) -> str:
        """Hex SHA-256 of all that the pool says, equal on all ranks that agree."""
        said = [[dataclasses.asdict(entry) for entry in self.entries], dataclasses.asdict(self.home)]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class _EntryConfig(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    strategy: str
    bound_tokens: int


def _entry_from_config(item: object) -> PoolEntry:
    if isinstance(item, str):
        return PoolEntry.parse(item)
    if isinstance(item, dict) and len(item) == 1 and "strategy" not in item and "bound_tokens" not in item:
        # "- tp1: 4096" with a space is a mapping to YAML.
        ((strategy, bound),) = item.items()
        item = {"strategy": strategy, "bound_tokens": bound}
    try:
        config = _EntryConfig.model_validate(item)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']} (got {first['input']!r}); {_FORM}") from None
    return PoolEntry(strategy=ParallelStrategy.parse(config.strategy), bound_tokens=config.bound_tokens)


def _as_home(home: object) -> ParallelStrategy | None:
    if home is None or isinstance(home, ParallelStrategy):
        return home
    try:
        return ParallelStrategy.parse(str(home))
    except ValueError as error:
        raise ValueError(f"pool: home: {error}") from None
