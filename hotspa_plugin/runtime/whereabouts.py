"""On which node each rank runs."""

from __future__ import annotations

import os

import numpy as np
import torch.distributed as dist

from hotspa_plugin.runtime.trace import machine_id


def gather_nodes() -> np.ndarray:
    """Node of every rank, numbered from 0 in order of first ranks, int64 of shape ``[num_ranks]``; collective.

    Nodes are what torchrun calls so; ranks that it has not started share a node where they share a machine.
    """
    mine = os.environ.get("GROUP_RANK") or machine_id()
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    number = {name: index for index, name in enumerate(dict.fromkeys(everyone))}
    return np.array([number[name] for name in everyone], dtype=np.int64)
