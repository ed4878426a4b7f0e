"""Peak memory of this process since a moment of one's choosing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from pathlib import Path

import torch

LARGE_ALLOCATION_BYTES = 64 * 2**10
# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


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


def rank_memory_bytes(num_local_ranks: int) -> int | None:
    """Memory that one of ``num_local_ranks`` ranks of this machine can have: its GPU's, or its share of main memory."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks:
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local_ranks
    except (ValueError, OSError):
        return None


def give_back_memory() -> None:
    """Frees what was dropped and, where the C library can, hands it back, so that it does not hide later growth."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory() -> None:
    """From now on tensors of a CPU process give their memory back when they are freed, as far as the C library can.

    To be called where memory is planned for. glibc raises the size from which an allocation gets pages of its own
    with every larger one that is freed, up to 32 MB, and keeps what lies below: activations of a few MB then leave so
    many gaps that a process takes up to 2.4 times what is live, and not the same in every run. The price is time for
    new pages: up to a fifth of a step of the tiny models. Nothing on CUDA depends on it.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_ALLOCATION_BYTES)  # setting it also keeps it where it is
        library.mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_ALLOCATION_BYTES)


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
