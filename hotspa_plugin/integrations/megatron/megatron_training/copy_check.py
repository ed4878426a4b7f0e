"""Whether all copies of every parameter are still the same, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.runtime.global_view import shard_view


def check_copies(layout: ShardLayout, rank: int, parameters: Mapping[str, torch.Tensor], *, step: int) -> None:
    """Compares checksums of all shards that several ranks hold; collective over the world.

    Raises RuntimeError, on every rank, naming tensors and ranks that differ.
    """
    mine = {}
    for shard in layout.shards(rank):
        data = shard_view(parameters[shard.parameter], shard).detach().contiguous().cpu()
        digest = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
        mine[layout.tensors[shard.tensor].name, shard.region.low, shard.region.high] = digest
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first: dict[tuple, tuple[int, str]] = {}
    differing = []
    for other, digests in enumerate(everyone):
        for key, digest in digests.items():
            holder, expected = first.setdefault(key, (other, digest))
            if digest != expected:
                differing.append(f"{key[0]} (ranks {holder} and {other})")
    if differing:
        raise RuntimeError(
            f"step {step}: copies of parameters differ: {', '.join(differing[:5])}"
            f"{' and more' if len(differing) > 5 else ''}. Go on from the last checkpoint, and report the flags"
        )
