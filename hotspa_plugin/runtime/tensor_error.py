"""How far tensors are from what they should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorError:
    """Relative difference of one tensor: norm of the difference over the norm, both by fp64 sums."""

    name: str
    error: float


def tensor_errors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, floor: float = 1e-7
) -> list[TensorError]:
    """Per tensor, worst first. A tensor's norm counts at least ``floor`` times the norm of all of ``expected``."""
    if actual.keys() != expected.keys():
        raise ValueError(f"tensors differ: {sorted(actual.keys() ^ expected.keys())} are on one side only")
    smallest = floor * whole_norm(expected)
    errors = []
    for name, right in expected.items():
        difference = (actual[name].double() - right.double()).norm().item()
        scale = max(right.double().norm().item(), smallest)
        errors.append(TensorError(name=name, error=difference / scale if scale else difference))
    return sorted(errors, key=lambda e: -e.error if e.error == e.error else float("-inf"))


def whole_norm(tensors: Mapping[str, torch.Tensor]) -> float:
    """Norm over all elements of all tensors."""
    return sum(t.double().square().sum().item() for t in tensors.values()) ** 0.5


def whole_error(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Norm of all differences over the norm of all of ``expected``."""
    difference = {name: actual[name].double() - expected[name].double() for name in expected}
    return whole_norm(difference) / max(whole_norm(expected), 1e-30)
