"""What ``megatron.training`` needs, beyond redirected CUDA calls, to run where there is no CUDA."""

from __future__ import annotations

import sys
from typing import Any

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
    _patches = patches


def disable() -> None:
    """Puts everything back."""
    global _patches
    if _patches is not None:
        _patches.restore()
        _patches = None
    cpu.disable()
