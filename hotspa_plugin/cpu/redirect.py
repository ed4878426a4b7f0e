"""Redirects what names the CUDA device to the CPU, reversibly."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from hotspa_plugin.cpu import cuda_stand_ins
from hotspa_plugin.cpu.patches import PatchSet

# Factories that take ``device=``; an explicit "cuda" there would try to initialise a driver.
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor",
    "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

_patches: PatchSet | None = None


def is_enabled() -> bool:
    """Whether CUDA calls are being redirected in this process."""
    return _patches is not None


def enable() -> None:
    """Redirects CUDA calls of this process to the CPU. Calling it again changes nothing.

    Raises RuntimeError where a real CUDA device is present: hiding it would be a mistake.
    """
    global _patches
    if _patches is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "hotspa_plugin.cpu is for machines without CUDA, but a CUDA device is present: "
            "do not enable it, or hide the device with CUDA_VISIBLE_DEVICES=''"
        )
    # Megatron asks for it where tensor parallel > 1 on devices older than Blackwell; it has no effect on CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    patches = PatchSet()
    for name, value in cuda_stand_ins.functions().items():
        if hasattr(torch.cuda, name):
            patches.replace(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        patches.replace(torch.cuda.random, name, getattr(torch.cuda, name))
    # torch.distributed and the optimizers ask torch.accelerator which device to use: there is none.
    patches.replace(torch.accelerator, "is_available", lambda: False)
    patches.replace(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
    for name in _FACTORIES:
        patches.replace(torch, name, _without_cuda(getattr(torch, name)))
    for name in _METHODS:
        patches.replace(torch.Tensor, name, _without_cuda(getattr(torch.Tensor, name)))
    patches.replace(torch.nn.Module, "to", _without_cuda(torch.nn.Module.to))
    patches.replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    patches.replace(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)
    patches.replace(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)
    patches.replace(torch.Tensor, "record_stream", lambda self, *args, **kwargs: None)
    patches.replace(torch.Tensor, "type", _type_named_cuda(torch.Tensor.type))
    _patches = patches


def disable() -> None:
    """Puts everything back as it was before :func:`enable`."""
    global _patches
    if _patches is not None:
        _patches.restore()
        _patches = None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _without_cuda(function: Callable) -> Callable:
    """``function`` with every CUDA device among its arguments, and every integer ``device=``, made the CPU."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_cuda, args)):
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        device = kwargs.get("device")
        if device is not None and (_is_cuda(device) or type(device) is int):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return redirected


def _type_named_cuda(original: Callable) -> Callable:
    """``Tensor.type()`` naming CUDA types, which Megatron's gradient clipping compares against."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            if args and isinstance(args[0], str):
                args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else original(self)

    return type_
