"""Optimizers and parameter groups that users built over their own model, carried over to home's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def bind_groups(
    groups: Iterable[Any] | None, own: Mapping[int, str], host: Mapping[str, torch.nn.Parameter]
) -> list[Any] | None:
    """``model_parameters`` as DeepSpeed takes them, over ``host``'s parameters instead of the user's.

    ``own`` names the user's parameters by ``id``. Frozen ones are left out, as everywhere.
    """
    if groups is None:
        return None
    bound: list[Any] = []
    for group in groups:
        if isinstance(group, Mapping):
            bound.append({**group, "params": _bind(group["params"], own, host)})
        else:
            bound += _bind([group], own, host)
    return bound


def bind_optimizer(
    optimizer: torch.optim.Optimizer, own: Mapping[int, str], host: Mapping[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Makes a fresh ``optimizer`` update ``host``'s parameters instead of the user's, in place."""
    if optimizer.state:
        raise ValueError(f"optimizer {type(optimizer).__name__}: has stepped already: pass it before its first step")
    for group in optimizer.param_groups:
        group["params"] = _bind(group["params"], own, host)
    return optimizer


def _bind(parameters: Any, own: Mapping[int, str], host: Mapping[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    bound = []
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        name = own.get(id(parameter))
        if name is None:
            raise ValueError(
                f"optimizer: a parameter of shape {tuple(parameter.shape)} does not belong to the model: build the "
                "optimizer from the parameters of the model that initialize is given"
            )
        if host[name].requires_grad:
            bound.append(host[name])
    return bound
