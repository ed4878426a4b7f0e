"""Peak memory of this process since a moment of one's choosing."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


class PeakMemory:
    """Measures the device's allocator on CUDA, resident memory of the process elsewhere. All figures in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> None:
        """Starts a new peak at what is held now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            # Linux: 5 resets the high-water mark of resident memory, VmHWM (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass  # the peak then counts from the start of the process

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Resident memory of this process now; 0 where the system does not tell."""
    return _status_bytes("VmRSS") or 0


def _status_bytes(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
