"""What ``torch.cuda`` answers where there is no CUDA: one device, one stream, nothing asynchronous."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from typing import Any

import torch


class Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: Any) -> None: ...


class Event:
    """An event that remembers the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._recorded_at_s - self._recorded_at_s) * 1e3


class DeviceProperties:
    """Reports compute capability 8.0 and one multiprocessor: enough for branches, never used to compute."""

    name = "CPU standing in for CUDA"
    major, minor = 8, 0
    multi_processor_count = 1
    total_memory = 1 << 40


class Generators:
    """Every device's random generator is the CPU's, the one that dropout draws from on CPU tensors."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


_STREAM = Stream()


def _peak_resident_bytes() -> Callable[..., int]:
    return lambda *args, **kwargs: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# TorchDynamo refuses one object under two names of torch.cuda, so every name gets a function of its own.
def _nothing() -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _null_context() -> Callable[..., contextlib.AbstractContextManager]:
    return lambda *args, **kwargs: contextlib.nullcontext()


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def functions() -> dict[str, Any]:
    """Names of ``torch.cuda`` and what replaces them."""
    return {
        "is_available": _returns(True),
        "is_initialized": _returns(True),
        "is_current_stream_capturing": _returns(False),
        "is_bf16_supported": _returns(True),
        "init": _nothing(),
        "current_device": lambda: torch.device("cpu"),
        "device_count": _returns(1),
        "set_device": _nothing(),
        "device": _null_context(),
        "get_device_properties": lambda *args, **kwargs: DeviceProperties(),
        "get_device_capability": _returns((8, 0)),
        "get_device_name": _returns(DeviceProperties.name),
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "ipc_collect": _nothing(),
        "Stream": Stream,
        "Event": Event,
        "stream": _null_context(),
        "current_stream": _returns(_STREAM),
        "default_stream": _returns(_STREAM),
        "set_stream": _nothing(),
        "default_generators": Generators(),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "manual_seed_all": _nothing(),  # torch.manual_seed itself calls it
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "memory_allocated": _returns(0),
        "memory_reserved": _returns(0),
        "max_memory_allocated": _peak_resident_bytes(),
        "max_memory_reserved": _peak_resident_bytes(),
        "reset_peak_memory_stats": _nothing(),
        "memory_stats": lambda *args, **kwargs: {},
        "mem_get_info": _returns((1 << 40, 1 << 40)),
    }
