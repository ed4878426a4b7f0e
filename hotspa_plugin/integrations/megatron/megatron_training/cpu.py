"""What ``megatron.training`` needs, beyond redirected CUDA calls, to run where there is no CUDA."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hotspa_plugin import cpu
from hotspa_plugin.cpu.patches import PatchSet

_patches: PatchSet | None = None


def enable() -> None:
    """Redirects CUDA calls to the CPU and lets Megatron's local layers and start-up work there; once is enough.

    To be called before Megatron is imported, which would otherwise find an installed TransformerEngine and build
    layers that need a GPU. Raises RuntimeError where a CUDA device is present.
    """
    global _patches
    if _patches is not None:
        return
    if "megatron" not in sys.modules:
        sys.modules.setdefault("transformer_engine", None)
    cpu.enable()
    from megatron.core.datasets import utils
    from megatron.core.transformer import torch_norm

    from hotspa_plugin.integrations.megatron.norm import Norm

    patches = PatchSet()
    # The wheel brings the data set helpers compiled; there is no compiler to count on.
    patches.replace(utils, "compile_helpers", lambda: None)
    stock_norm = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        # The local norm refuses sequence parallel; ours marks its parameters for it.
        build = Norm.__new__ if config.sequence_parallel else stock_norm
        return build(cls, config=config, hidden_size=hidden_size, eps=eps, **options)

    patches.replace(torch_norm.WrappedTorchNorm, "__new__", norm)
    _let_local_attention_take_documents(patches)
    _repair_adam_state(patches)
    _patches = patches


def _let_local_attention_take_documents(patches: PatchSet) -> None:
    """Megatron's local attention refuses packed sequences; there is no other attention without a GPU."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from hotspa_plugin.integrations.megatron.attention import packed_attention

    stock = DotProductAttention.forward

    def forward(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        packed = options.get("packed_seq_params")
        if packed is None:
            return stock(self, query, key, value, *rest, **options)
        return packed_attention(self, query, key, value, packed)

    patches.replace(DotProductAttention, "forward", forward)


def _repair_adam_state(patches: PatchSet) -> None:
    """Lets the distributed optimizer load checkpoints with torch's own Adam, which stock Megatron cannot.

    Before loading, it reads the step count of a state that torch's Adam allocates in its first step only; it takes
    the step count for one of the sharded tensors, and writes fp32 parameters that require gradients; after loading,
    all parameters share one step tensor, which each of them then advances.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    kind = distrib_optimizer.DistributedOptimizer
    stock_sharded, stock_load = kind.sharded_state_dict, kind.load_state_dict
    stock_set = kind._set_main_param_and_optimizer_states

    def sharded_state_dict(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **options: Any) -> Any:
        if is_loading and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    empty = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **empty}
        return stock_sharded(self, model_sharded_state_dict, is_loading, **options)

    def load_state_dict(self: Any, state_dict: Any) -> None:
        stock_load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            stock_set(self, model_param, {**tensors, "step": None})

    patches.replace(kind, "_set_main_param_and_optimizer_states", set_states)
    patches.replace(kind, "sharded_state_dict", sharded_state_dict)
    patches.replace(kind, "load_state_dict", load_state_dict)


def disable() -> None:
    """Puts everything back."""
    global _patches
    if _patches is not None:
        _patches.restore()
        _patches = None
    cpu.disable()
