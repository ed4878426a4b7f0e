"""What to do with sequences longer than the last bucket's bound."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from hotspa_plugin.data.sequences import SequenceSource, digest_of

OverlongPolicy = Literal["error", "truncate", "split", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongCounts:
    """What a policy did to a source."""

    policy: OverlongPolicy
    bound_tokens: int
    num_overlong: int  # sequences over the bound
    num_pieces: int  # sequences they became: one each if truncated, several if split, none if dropped
    num_dropped_tokens: int

    def __str__(self) -> str:
        done = {
            "error": "",
            "truncate": f"cut to it, leaving out {self.num_dropped_tokens:,} tokens",
            "split": f"split into {self.num_pieces:,} sequences",
            "drop": f"left out, {self.num_dropped_tokens:,} tokens in all",
        }[self.policy]
        if not self.num_overlong:
            return f"no sequence is over {self.bound_tokens:,} tokens"
        return f"{self.num_overlong:,} sequences over {self.bound_tokens:,} tokens: {done}"


class LimitedSource:
    """A view of a source in which no sequence is longer than ``bound_tokens``; a ``SequenceSource`` itself.

    ``error`` refuses a source with a longer one; ``truncate`` keeps the first ``bound_tokens`` tokens; ``split`` cuts
    into pieces of the bound and a rest, each a sequence of its own (so one target is lost at each cut); ``drop``
    leaves the sequence out. ``counts`` says what was done.
    """

    def __init__(self, source: SequenceSource, *, bound_tokens: int, policy: OverlongPolicy = "error") -> None:
        if policy not in ("error", "truncate", "split", "drop"):
            raise ValueError(f"policy for overlong sequences {policy!r}: choose error, truncate, split or drop")
        if bound_tokens < 1:
            raise ValueError(f"bound of {bound_tokens} tokens: must be at least 1")
        self._source = source
        self._policy = policy
        self._bound_tokens = bound_tokens
        lengths = source.lengths
        overlong = np.flatnonzero(lengths > bound_tokens)
        if policy == "error" and len(overlong):
            raise ValueError(
                f"{source.name(int(overlong[0]))}: has {lengths[overlong[0]]} tokens, over the last bound of "
                f"{bound_tokens} ({len(overlong)} sequences are, the longest has {lengths.max()}): raise the bound, or "
                "choose truncate, split or drop for overlong sequences"
            )
        if policy == "split":
            num_pieces = -(-lengths // bound_tokens)
        elif policy == "drop":
            num_pieces = (lengths <= bound_tokens).astype(np.int64)
        else:
            num_pieces = np.ones(len(lengths), dtype=np.int64)
        self._parents = np.repeat(np.arange(len(lengths)), num_pieces)
        if len(self._parents) == 0:
            raise ValueError(
                f"all {len(lengths)} sequences are over the last bound of {bound_tokens} tokens and would be dropped: "
                "raise the bound, or choose truncate or split"
            )
        first_piece = np.cumsum(num_pieces) - num_pieces
        self._starts = (np.arange(len(self._parents)) - first_piece[self._parents]) * bound_tokens
        self.lengths = np.minimum(lengths[self._parents] - self._starts, bound_tokens)
        self.counts = OverlongCounts(
            policy=policy,
            bound_tokens=bound_tokens,
            num_overlong=len(overlong),
            num_pieces=int(num_pieces[overlong].sum()),
            num_dropped_tokens=int(lengths.sum() - self.lengths.sum()),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def vocab_size(self) -> int:
        return self._source.vocab_size

    def tokens(self, index: int) -> np.ndarray:
        start = self._starts[index]
        return self._source.tokens(int(self._parents[index]))[start : start + self.lengths[index]]

    def name(self, index: int) -> str:
        parent = int(self._parents[index])
        start, end = self._starts[index], self._starts[index] + self.lengths[index]
        whole = start == 0 and end == self._source.lengths[parent]
        return self._source.name(parent) + ("" if whole else f" tokens {start} to {end}")

    def fingerprint(self) -> str:
        return digest_of("limited", self._policy, str(self._bound_tokens), self._source.fingerprint())
