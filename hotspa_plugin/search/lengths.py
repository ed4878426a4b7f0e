"""Where the lengths of batches come from: a named distribution, a file of lengths, or a histogram."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pydantic

from hotspa_plugin.data.length_distributions import SPECS, draw_lengths, read_lengths


class _Bin(pydantic.BaseModel):
    over_tokens: pydantic.NonNegativeInt
    up_to_tokens: pydantic.PositiveInt | None = None
    percent_of_sequences: pydantic.NonNegativeFloat


class _Histogram(pydantic.BaseModel):
    bins: list[_Bin]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LengthSource:
    """Draws batches of lengths in tokens, cut at ``max_tokens``; the same seed gives the same batch."""

    name: str
    max_tokens: int | None = None
    spec: str | None = None
    lengths: np.ndarray | None = None
    histogram: _Histogram | None = None

    @classmethod
    def open(cls, given: str, *, max_tokens: int | None = None) -> LengthSource:
        """Reads what ``--lengths`` names.

        That is: a distribution as ``draw_lengths`` reads it, a text file with one length a line (``.gz`` too), or a
        JSON file with ``bins`` of ``over_tokens``, ``up_to_tokens`` (missing or null in an open last one: twice the
        lower end is taken) and ``percent_of_sequences``, within which lengths are drawn evenly in their logarithm.
        ValueError naming file and way out.
        """
        path = Path(given)
        if path.suffix == ".json" or (path.is_file() and path.read_bytes()[:1] == b"{"):
            return cls(name=path.name, max_tokens=max_tokens, histogram=_read_histogram(path))
        if path.is_file():
            return cls(name=path.name, max_tokens=max_tokens, lengths=read_lengths(path))
        try:
            draw_lengths(given, 1)
        except ValueError as error:
            if ":" in given or given == "wikipedia":
                raise
            raise ValueError(f"--lengths {given}: there is no such file; name one, or use {SPECS}") from error
        return cls(name=given, max_tokens=max_tokens, spec=given)

    def draw(self, num_sequences: int, *, seed: int) -> np.ndarray:
        """Lengths of one batch, int64 of shape ``[num_sequences]``."""
        if self.spec is not None:
            return draw_lengths(self.spec, num_sequences, seed=seed, max_tokens=self.max_tokens)
        generator = np.random.RandomState(seed % 2**32)
        if self.lengths is not None:
            lengths = generator.choice(self.lengths, num_sequences)
        else:
            assert self.histogram is not None
            bins = self.histogram.bins
            shares = np.array([b.percent_of_sequences for b in bins])
            low = np.array([max(b.over_tokens, 1) for b in bins], dtype=np.float64)
            high = np.array([b.up_to_tokens or 2 * max(b.over_tokens, 1) for b in bins], dtype=np.float64)
            chosen = generator.choice(len(bins), num_sequences, p=shares / shares.sum())
            place = generator.random_sample(num_sequences)
            lengths = np.ceil(low[chosen] * (high / low)[chosen] ** place).astype(np.int64)
        return np.clip(lengths, 1, self.max_tokens)


def _read_histogram(path: Path) -> _Histogram:
    try:
        histogram = _Histogram.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a histogram of lengths ({error})") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        raise ValueError(
            f"{path}: {where}: {first['msg']}; a histogram has bins of over_tokens, up_to_tokens and "
            "percent_of_sequences"
        ) from None
    if sum(b.percent_of_sequences for b in histogram.bins) <= 0:
        raise ValueError(f"{path}: the histogram is empty: give at least one bin with percent_of_sequences over 0")
    for number, b in enumerate(histogram.bins, start=1):
        if b.up_to_tokens is not None and b.up_to_tokens <= b.over_tokens:
            raise ValueError(f"{path}: bin {number} ends at {b.up_to_tokens}, not above its start {b.over_tokens}")
    return histogram
