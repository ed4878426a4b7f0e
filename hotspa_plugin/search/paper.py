"""The settings of HotSPa's paper: models, numbers of GPUs, and the pools that were written for them by hand."""

from __future__ import annotations

import dataclasses
import re

from hotspa_plugin.resharding.bench import read_settings
from hotspa_plugin.strategy import ParallelStrategy, PoolEntry


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """One of the paper's pools; home is its last strategy."""

    name: str
    model: str
    num_ranks: int
    entries: tuple[PoolEntry, ...]

    def up_to(self, context_tokens: int) -> tuple[PoolEntry, ...]:
        """The pool for a context: what is over it is left out, and the last bound is the context."""
        kept = []
        for entry in self.entries:
            kept.append(dataclasses.replace(entry, bound_tokens=min(entry.bound_tokens, context_tokens)))
            if entry.bound_tokens >= context_tokens:
                break
        return tuple(kept)


def paper_settings() -> list[PaperSetting]:
    """All settings, in the published order."""
    settings = []
    for name, rows in read_settings().settings.items():
        match = re.fullmatch(r"(\S+) on (\d+)(, .*)?", name)
        assert match, name
        entries = tuple(
            PoolEntry(strategy=ParallelStrategy(tp=row.tp, pp=row.pp, dp=row.dp), bound_tokens=row.up_to_tokens)
            for row in rows
        )
        settings.append(PaperSetting(name=name, model=match[1], num_ranks=int(match[2]), entries=entries))
    return settings
