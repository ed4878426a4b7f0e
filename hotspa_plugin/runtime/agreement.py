"""All ranks must hold the same pool, plan and batch: what each says of it is compared before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

_DIGEST_BYTES = 16
_MAX_SHOWN = 4  # differences named in a message
_MAX_VALUE = 80  # characters of a value


def check_agreement(
    what: str,
    said: str | Mapping[str, object],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> None:
    """Raises RuntimeError, on every rank, where ranks say different things of ``what``.

    ``said`` is a digest, or a mapping from names to JSON-able values: then the message names what differs, and how.
    Collective over ``group`` (default: the world); costs one small all-gather, and another one where ranks disagree.
    """
    text = said if isinstance(said, str) else json.dumps(said, sort_keys=True, default=str)
    mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]), dtype=torch.uint8)
    mine = mine.to(device) if device is not None else mine
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    different = [rank for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
    if not different:
        return
    message = f"ranks disagree about {what}: rank(s) {different} differ from rank 0"
    if not isinstance(said, str):
        everyone: list[Mapping[str, object]] = [{} for _ in gathered]
        dist.all_gather_object(everyone, json.loads(text), group=group)
        message += f": {describe_differences(everyone)}"
    raise RuntimeError(f"{message}. Start all ranks with the same configuration, data and package versions")


def describe_differences(everyone: Sequence[Mapping[str, object]]) -> str:
    """What each rank says differently from rank 0, by name; ranks that say the same stand together."""
    told = []
    for name in dict.fromkeys(name for said in everyone for name in said):
        values: dict[str, list[int]] = {}
        for rank, said in enumerate(everyone):
            values.setdefault(json.dumps(said.get(name), sort_keys=True), []).append(rank)
        if len(values) > 1:
            told.append(f"{name} is " + ", ".join(f"{_short(v)} on {_ranks(ranks)}" for v, ranks in values.items()))
    more = f" and {len(told) - _MAX_SHOWN} more" if len(told) > _MAX_SHOWN else ""
    return "; ".join(told[:_MAX_SHOWN]) + more


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, with dotted names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
