"""A recorder that keeps nothing but the seconds of a step's phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from hotspa_plugin.runtime.recorder import NullRecorder, Span


class Stopwatch(NullRecorder):
    """Times spans and adds them up by name in ``phase_s``, until ``start_step`` sets all to 0.

    ``synchronize`` waits for the device at both ends of a span. Spans inside others count under both names.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self.phase_s: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[Span]:
        self._synchronize()
        span = Span(name=name, args=args, depth=0, start_ns=time.perf_counter_ns())
        try:
            yield span
            self._synchronize()
        finally:
            span.end_ns = time.perf_counter_ns()
            self.phase_s[name] = self.phase_s.get(name, 0.0) + span.seconds

    def start_step(self) -> None:
        self.phase_s = {}
