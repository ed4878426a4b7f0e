"""Computes the next batch's assignment while the current one trains."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hotspa_plugin.data.assignment import BatchAssignment


class _Assigner(Protocol):
    def assign(self, lengths: np.ndarray | Sequence[int]) -> BatchAssignment: ...


class AheadAssigner:
    """Wraps an assigner: what ``prepare`` was told of is computed in a thread, and ``assign`` collects it.

    ``assign`` without a matching ``prepare`` computes at once, so results never depend on what was prepared. The last
    two batches are kept, so that the next one can be prepared before the current one is asked for; errors of the thread
    are raised by ``assign``. Close it at the end, or use it as a context manager.
    """

    def __init__(self, assigner: _Assigner) -> None:
        self._assigner = assigner
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="assign-ahead")
        self._prepared: dict[bytes, concurrent.futures.Future[BatchAssignment]] = {}  # by lengths, oldest first

    def prepare(self, lengths: np.ndarray | Sequence[int]) -> None:
        """Starts on a batch with these lengths (tokens, shape ``[num_sequences]``)."""
        lengths = np.array(lengths, dtype=np.int64)  # a copy: the caller may change its own
        self._prepared[lengths.tobytes()] = self._pool.submit(self._assigner.assign, lengths)
        while len(self._prepared) > 2:
            self._prepared.pop(next(iter(self._prepared))).cancel()

    def assign(self, lengths: np.ndarray | Sequence[int]) -> BatchAssignment:
        """The assignment of a batch with these lengths."""
        lengths = np.asarray(lengths, dtype=np.int64)
        prepared = self._prepared.pop(lengths.tobytes(), None)
        return self._assigner.assign(lengths) if prepared is None else prepared.result()

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> AheadAssigner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
