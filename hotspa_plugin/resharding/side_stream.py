"""A CUDA stream beside the current one; on other devices nothing."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


class SideStream:
    """Work under ``current()`` runs on a stream of its own, after what ``follow_current`` saw."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow_current(self) -> None:
        """What is in the current stream now comes before all that the side stream is given from here on."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def follow(self, event: torch.cuda.Event | None) -> None:
        """What came before ``event`` (of ``mark_current``) comes before all the side stream is given from here on."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Returns when the device has done all that the side stream was given."""
        if self._stream is not None:
            self._stream.synchronize()

    def join_current(self) -> None:
        """What the side stream has been given so far comes before all that the current stream is given from here on."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def current(self) -> AbstractContextManager[object]:
        """A context in which the side stream is the current one."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


def mark_current(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the current stream of ``device`` has been given; None where there are no streams."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
