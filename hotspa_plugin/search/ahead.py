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

    ``assign`` without a matching ``prepare`` computes at once, so results never depend on what was prepared. One batch is
    kept; errors of the thread are raised by ``assign``. Close it at the end, or use it as a context manager.
    """

    def __init__(self, assigner: _Assigner) -> None:
        self._assigner = assigner
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="assign-ahead")
        self._prepared: tuple[bytes, concurrent.futures.Future[BatchAssignment]] | None = None

    def prepare(self, lengths: np.ndarray | Sequence[int]) -> None:
        """Starts on a batch with these lengths (tokens, shape ``[num_sequences]``); forgets an earlier one."""
        lengths = np.array(lengths, dtype=np.int64)  # a copy: the caller may change its own
        if self._prepared is not None:
            self._prepared[1].cancel()
        self._prepared = lengths.tobytes(), self._pool.submit(self._assigner.assign, lengths)

    def assign(self, lengths: np.ndarray | Sequence[int]) -> BatchAssignment:
        """The assignment of a batch with these lengths."""
        lengths = np.asarray(lengths, dtype=np.int64)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == lengths.tobytes():
            return prepared[1].result()
        return self._assigner.assign(lengths)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> AheadAssigner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
