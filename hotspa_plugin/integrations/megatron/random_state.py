"""Random generators set anew before every micro-batch, so that dropout depends on nothing that ran before."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker

from hotspa_plugin.topology import Coordinate

_MODEL_PARALLEL = "model-parallel-rng"
_OTHERS = ("data-parallel-rng", "expert-parallel-rng")


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers, well mixed: neighbouring parts give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def seed_micro_batch(seed: int, step: int, bucket: int, micro_batch: int, place: Coordinate, *, chunk: int = 0) -> None:
    """Sets the default generator, the same on all tensor-parallel peers, and their own generators, each different.

    ``micro_batch`` counts within the bucket and the data-parallel replica, ``chunk`` the rank's model chunks.
    """
    shared = (seed, step, bucket, micro_batch, place.dp, place.pp + (chunk << 20))
    torch.manual_seed(derive_seed(*shared))
    states = {}
    default = _device_state()
    for index, name in enumerate((_MODEL_PARALLEL, *_OTHERS)):
        own = (place.tp,) if name == _MODEL_PARALLEL else ()
        torch.cuda.manual_seed(derive_seed(*shared, index + 1, *own))
        states[name] = _device_state()
    torch.cuda.set_rng_state(default)
    get_cuda_rng_tracker().set_states(states)


def prepare() -> None:
    """Makes Megatron's tracker exist, with every generator that its modules may ask for."""
    initialize_rng_tracker()
    seed_micro_batch(0, 0, 0, 0, Coordinate(tp=0, cp=0, dp=0, pp=0))


def _device_state() -> torch.Tensor:
    return torch.cuda.get_rng_state()
