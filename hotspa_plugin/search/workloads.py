"""Batches of lengths for benchmarks, by name."""

from __future__ import annotations

import math

import numpy as np

from hotspa_plugin.data import ByteTokenizer, PythonLibrary, TokenizedSource, draw_lengths

# Mean 1024 and sigma 1.5 between 128 and 8192 tokens: the workload that Megatron-core's dynamic context parallelism is
# benchmarked with. A log-normal's median is its mean over exp(sigma^2 / 2).
_DYNAMIC_MEAN, _DYNAMIC_SIGMA, _DYNAMIC_LEAST, _DYNAMIC_MOST = 1024, 1.5, 128, 8192
WORKLOADS = ("wikipedia", "stdlib", "dynamic-context", "uniform", "one-huge")


def workload_batches(
    name: str, num_batches: int, *, batch_tokens: int, longest_tokens: int, seed: int = 0
) -> list[np.ndarray]:
    """Batches of about ``batch_tokens`` tokens (one sequence at least), lengths cut at ``longest_tokens``.

    ``uniform`` has one length throughout, an eighth of the longest; ``one-huge`` has one of the longest in each batch
    among short ones. ValueError for an unknown name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is unknown; choose among {', '.join(WORKLOADS)}")
    if name == "uniform":
        length = max(1, longest_tokens // 8)
        return [np.full(max(1, batch_tokens // length), length, dtype=np.int64) for _ in range(num_batches)]
    pool = _draw(name, num_batches * batch_tokens, longest_tokens, seed)
    batches, at = [], 0
    for _ in range(num_batches):
        lengths = [longest_tokens] if name == "one-huge" else []
        while not lengths or sum(lengths) < batch_tokens:
            lengths.append(int(pool[at % len(pool)]))
            at += 1
        batches.append(np.array(lengths, dtype=np.int64))
    return batches


def _draw(name: str, num_tokens: int, longest_tokens: int, seed: int) -> np.ndarray:
    """Plenty of lengths."""
    count = max(1000, num_tokens // 32)
    if name == "wikipedia":
        return draw_lengths("wikipedia", count, seed=seed, max_tokens=longest_tokens)
    if name == "one-huge":
        return draw_lengths(f"uniform:16-{max(16, longest_tokens // 16)}", count, seed=seed)
    if name == "dynamic-context":
        median = _DYNAMIC_MEAN / math.exp(_DYNAMIC_SIGMA**2 / 2)
        lengths = draw_lengths(f"lognormal:{median:.1f},{_DYNAMIC_SIGMA}", count, seed=seed)
        return np.clip(lengths, min(_DYNAMIC_LEAST, longest_tokens), min(_DYNAMIC_MOST, longest_tokens))
    lengths = np.asarray(TokenizedSource(PythonLibrary(), ByteTokenizer()).lengths)
    return np.minimum(np.random.RandomState(seed).choice(lengths, count), longest_tokens)
