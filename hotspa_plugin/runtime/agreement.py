"""All ranks must hold the same pool, plan and batch: digests are compared before they are used."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

_DIGEST_BYTES = 16


def check_agreement(
    what: str, digest: str, *, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Raises RuntimeError, on every rank, naming the ranks whose ``digest`` differs from the first one's.

    ``what`` names the thing in the message. Collective over ``group`` (default: the world); costs one small
    all-gather.
    """
    mine = torch.frombuffer(bytearray(hashlib.sha256(digest.encode()).digest()[:_DIGEST_BYTES]), dtype=torch.uint8)
    mine = mine.to(device) if device is not None else mine
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    different = [rank for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
    if different:
        raise RuntimeError(f"ranks disagree about {what}: rank(s) {different} differ from rank 0. Start all ranks with the "
                           "same configuration, data and package versions")
