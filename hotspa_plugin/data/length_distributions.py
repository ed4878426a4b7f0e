"""Lengths for mock data and estimates: the Wikipedia histogram, uniform, log-normal, or from a file."""

from __future__ import annotations

import gzip
import json
import math
from importlib import resources
from pathlib import Path

import numpy as np

SPECS = "wikipedia, uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA or file:PATH"


def draw_lengths(spec: str, num_sequences: int, *, seed: int = 0, max_tokens: int | None = None) -> np.ndarray:
    """Draws lengths in tokens, int64 of shape ``[num_sequences]``, the same for the same arguments everywhere.

    ``spec`` is one of: ``wikipedia``; ``uniform:16-512`` (both ends included); ``lognormal:400,1.2`` (median in tokens
    and sigma of the logarithm); ``file:lengths.txt`` (drawn with replacement from one length a line). Lengths over
    ``max_tokens`` are cut to it.

    Raises:
        ValueError: the spec cannot be read.
    """
    generator = np.random.RandomState(seed % 2**32)  # a frozen stream, as for the sampler
    kind, _, argument = spec.partition(":")
    try:
        if kind == "wikipedia" and not argument:
            lengths = _draw_wikipedia(generator, num_sequences)
        elif kind == "uniform":
            low, high = map(int, argument.split("-"))
            if not 1 <= low <= high:
                raise ValueError("bounds must satisfy 1 <= LOW <= HIGH")
            lengths = generator.randint(low, high + 1, num_sequences, dtype=np.int64)
        elif kind == "lognormal":
            median, sigma = map(float, argument.split(","))
            if not (median >= 1 and 0 <= sigma <= 10):
                raise ValueError("MEDIAN must be at least 1 and SIGMA between 0 and 10")
            lengths = np.rint(generator.lognormal(math.log(median), sigma, num_sequences)).astype(np.int64)
        elif kind == "file" and argument:
            lengths = generator.choice(read_lengths(argument), num_sequences)
        else:
            raise ValueError("unknown kind")
    except ValueError as error:
        raise ValueError(f"length distribution {spec!r}: {error}: use {SPECS}") from error
    return np.clip(lengths, 1, max_tokens)


def read_lengths(path: str | Path) -> np.ndarray:
    """Lengths in tokens from a text file (``.gz`` too) with one a line, int64; blank lines are passed over."""
    opener = gzip.open if str(path).endswith(".gz") else open
    lengths = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    length = int(line)
                except ValueError:
                    length = 0
                if not 1 <= length < 2**63:
                    raise ValueError(f"{path}:{number}: {line.strip()[:40]!r} is not a length of 1 token or more")
                lengths.append(length)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a text file of lengths ({error})") from error
    if not lengths:
        raise ValueError(f"{path}: holds no lengths: write one a line")
    return np.array(lengths, dtype=np.int64)


def wikipedia_histogram() -> dict:
    """The measured histogram of Wikipedia document lengths, with its source and the mean in tokens."""
    file = resources.files("hotspa_plugin.data").joinpath("wikipedia_length_histogram.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _draw_wikipedia(generator: np.random.RandomState, num_sequences: int) -> np.ndarray:
    """Draws a bin by its share of sequences, then a place in it so that the bin's share of tokens is right too.

    Within a bin, ``low + (high - low) * u**k`` with u uniform has mean ``low + (high - low) / (k + 1)``; k follows from
    the bin's published mean. The open last bin is closed so that its mean is its middle.
    """
    histogram = wikipedia_histogram()
    bins = histogram["bins"]
    shares = np.array([b["percent_of_sequences"] for b in bins])
    means = np.array([b["percent_of_tokens"] for b in bins]) / shares * histogram["mean"]
    low = np.array([b["over_tokens"] for b in bins], dtype=np.float64)
    high = np.array([b["up_to_tokens"] or 2 * mean - b["over_tokens"] for b, mean in zip(bins, means, strict=True)])
    exponent = (high - low) / (means - low) - 1
    chosen = generator.choice(len(bins), num_sequences, p=shares / shares.sum())
    place = (1 - generator.random_sample(num_sequences)) ** exponent[chosen]  # in (0, 1]: bins are half-open below
    return np.ceil(low[chosen] + (high - low)[chosen] * place).astype(np.int64)
