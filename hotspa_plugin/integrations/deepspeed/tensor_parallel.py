"""A Hugging Face model's own tensor-parallel plan, applied by torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

# How torch spells the styles that transformers' plans name.
_STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
_REPLICATED_PARTIAL = "replicated_with_grad_allreduce"
# Layers over the vocabulary may also stay whole, which is as exact.
_OVER_VOCABULARY = ("colwise_gather_output", "colwise_rep", "embedding_rowwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """``styles`` by module name (``*`` for a layer index); ``partial`` names the modules that stay whole on every
    rank but see only that rank's heads, so that their gradients must be added."""

    styles: Mapping[str, str]
    partial: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> TensorParallelPlan:
        """Reads ``model``'s plan. Raises ValueError where it has none, or one with a style that is not known."""
        name = type(model).__name__
        named = dict(getattr(model, "_tp_plan", None) or {})
        prefix = model.base_model_prefix
        for pattern, style in (model.config.base_model_tp_plan or {}).items():
            named.setdefault(f"{prefix}.{pattern}" if prefix else pattern, style)
        if not named:
            raise ValueError(
                f"model {name} has no tensor-parallel plan (config.base_model_tp_plan): use a pool of tp1 only, "
                "or a model whose configuration has a plan"
            )
        for pattern, style in named.items():
            if style not in _STYLES and style != _REPLICATED_PARTIAL:
                raise ValueError(
                    f"model {name}: its tensor-parallel plan asks for {style!r} at {pattern}, which hot "
                    f"switching does not know; known are {', '.join([*_STYLES, _REPLICATED_PARTIAL])}"
                )
        return cls(
            styles={pattern: style for pattern, style in named.items() if style in _STYLES},
            partial=tuple(pattern for pattern, style in named.items() if style == _REPLICATED_PARTIAL),
        )

    def is_partial(self, parameter: str) -> bool:
        """Whether ``parameter``'s copies hold different sums after the backward pass."""
        module = parameter.rpartition(".")[0].split(".")
        return any(_matches(pattern.split("."), module) for pattern in self.partial)

    def apply(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        """Turns ``model``'s parameters into DTensors on the one-dimensional ``mesh``, in place."""
        whole_vocabulary = model.config.vocab_size % mesh.size() != 0
        styles: dict[str, ParallelStyle] = {
            pattern: _STYLES[style]()
            for pattern, style in self.styles.items()
            if not (whole_vocabulary and style in _OVER_VOCABULARY)
        }
        parallelize_module(model, mesh, styles)


def _matches(pattern: list[str], name: list[str]) -> bool:
    return len(pattern) == len(name) and all(p in ("*", n) for p, n in zip(pattern, name))


def one_axis_mesh(group: torch.distributed.ProcessGroup, device: torch.device) -> DeviceMesh:
    """A mesh over an existing tensor-parallel group; makes no group of its own."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",))
