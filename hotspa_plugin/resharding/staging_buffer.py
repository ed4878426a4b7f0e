"""Memory that messages are packed into and unpacked from."""

from __future__ import annotations

import torch


class StagingBuffer:
    """Memory that messages are packed into; it grows to what a round needs, and is reused from run to run.

    Several executors may share one, as long as only one of them runs at a time: the storage is resized in
    place, so that views of it stay valid.
    """

    def __init__(self) -> None:
        self._line: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._line is None else self._line.untyped_storage().nbytes()

    def reserve(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A line of uint8 whose storage has at least ``num_bytes`` bytes; the same tensor every time."""
        if self._line is None:
            self._line = torch.empty(0, dtype=torch.uint8, device=device)
        assert self._line.device == device, "a staging buffer serves one device"
        if self.held_bytes < num_bytes:
            self.release()  # the old content is of no use: do not hold both
            self._line.untyped_storage().resize_(num_bytes)
        return self._line

    def release(self) -> None:
        """Gives the memory back until the next run."""
        if self._line is not None:
            self._line.untyped_storage().resize_(0)
