"""What a rank process of a command or a test does before it builds an engine."""

from __future__ import annotations

import logging
import os
import warnings

import torch


def prepare_process() -> None:
    """Chooses DeepSpeed's CPU accelerator where there is no CUDA, without its compiled shared-memory op.

    That op takes most of a minute to compile, and torch.distributed does its work as well. Changes nothing where
    there is CUDA.
    """
    on_cpu = not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Before DeepSpeed, which sets its logger's level when it is imported.
    import deepspeed

    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
