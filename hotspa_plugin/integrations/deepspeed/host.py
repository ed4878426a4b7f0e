"""The module that DeepSpeed trains: it owns home's parameters and turns finished gradients into a backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class _HandOver(torch.autograd.Function):
    """A zero whose gradient with respect to ``parameter`` is ``gradient * factor``."""

    @staticmethod
    def forward(ctx, parameter: torch.Tensor, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.gradient, ctx.factor = gradient, factor
        return torch.zeros((), dtype=torch.float32, device=gradient.device)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gradient * (grad_output * ctx.factor), None, None


class _Node(torch.nn.Module):
    """One level of dotted names. Its forward touches its own parameters only, so that DeepSpeed gathers no others."""

    def forward(self, gradients: Mapping[str, torch.Tensor], prefix: str, factor: float) -> torch.Tensor:
        return sum(
            _HandOver.apply(parameter, gradients[prefix + name], factor)
            for name, parameter in self.named_parameters(recurse=False)
            if parameter.requires_grad
        )


class HostModule(torch.nn.Module):
    """Home's parameters on this rank, in fp32, under their own dotted names.

    ``forward(loss, gradients, factor)`` returns ``loss``, a scalar, such that its backward pass gives every trainable
    parameter the gradient ``gradients[name] * factor``. Nothing is computed. Every name has at least one dot.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], trainable: Mapping[str, bool]) -> None:
        super().__init__()
        for name, value in values.items():
            *path, leaf = name.split(".")
            assert path, f"parameter {name} has no module"
            node: torch.nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, _Node())
                node = node.get_submodule(part)
            node.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=trainable[name]))

    def forward(self, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        total = loss
        for path, node in self.named_modules():
            if any(parameter.requires_grad for parameter in node.parameters(recurse=False)):
                total = total + node(gradients, f"{path}.", factor)
        return total
