"""What a rank process does before it imports Megatron."""

from __future__ import annotations

import logging
import sys
import warnings

import torch

from hotspa_plugin import cpu
from hotspa_plugin.runtime.memory import return_freed_memory


def prepare_process(*, on_cpu: bool | None = None) -> None:
    """Redirects CUDA calls where there is no CUDA (or ``on_cpu`` says so), and quiets advice to developers."""
    if on_cpu if on_cpu is not None else not torch.cuda.is_available():
        cpu.enable()
        if "transformer_engine" not in sys.modules:
            # Its norms would become the defaults of Megatron's blocks, and they need a GPU.
            sys.modules["transformer_engine"] = None
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    # The CPU generator stands in for CUDA's, so of course it changes where CUDA's would.
    noisy = ["models.gpt.gpt_model", "distributed.distributed_data_parallel"]
    if cpu.is_enabled():
        noisy.append("tensor_parallel.random")
    for name in noisy:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


def prepare_planned_memory() -> None:
    """For a process whose memory a profile measures, or plans: on the CPU too it should be what is live."""
    if cpu.is_enabled():
        return_freed_memory()
