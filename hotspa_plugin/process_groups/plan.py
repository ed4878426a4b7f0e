"""Which process groups the strategies of a pool need: ordered, deduplicated, the same on every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence

from hotspa_plugin.topology import RankGrid

Ranks = tuple[int, ...]

# What Megatron-core's parallel_state keeps for dense models, in the order in which it makes it.
# Its expert groups coincide with these where ep is 1.
GROUP_AXES = ("dp-cp", "dp", "cp", "tp-pp", "tp", "pp", "tp-dp-cp", "tp-dp", "tp-cp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One process group: its ranks, ascending, and its backend (None for the job's own)."""

    ranks: Ranks
    backend: str | None = None

    def __post_init__(self) -> None:
        check_ranks(self.ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """All groups of a job in the order in which every rank creates them."""

    groups: tuple[GroupSpec, ...]

    def __len__(self) -> int:
        return len(self.groups)

    def groups_of(self, rank: int) -> tuple[GroupSpec, ...]:
        """The groups that hold ``rank``, in creation order."""
        return tuple(group for group in self.groups if rank in group.ranks)

    def digest(self) -> str:
        """Hex SHA-256 over all groups and their order, equal on all ranks that agree."""
        said = [[group.ranks, group.backend] for group in self.groups]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def plan_groups(
    grids: Sequence[RankGrid],
    *,
    second_backend: str | None = None,
    second_backend_axes: Iterable[str] = ("dp-cp", "dp"),
    extra: Iterable[Sequence[int]] = (),
) -> GroupPlan:
    """The groups that all ``grids`` need together, each once.

    First the whole world, then strategy by strategy Megatron-core's groups (GROUP_AXES, the word
    embedding's and the position embedding's), then ``extra``. With ``second_backend`` (Megatron
    keeps gloo groups beside NCCL's) the groups along ``second_backend_axes`` exist under it as well.

    Raises ValueError where the grids differ in their world size.
    """
    sizes = sorted({grid.world_size for grid in grids})
    if len(sizes) != 1:
        raise ValueError(f"process groups: the rank grids must share one world size, but have {sizes or 'none'}")
    ordered: dict[GroupSpec, None] = {}

    def need(groups: Iterable[Sequence[int]], backend: str | None = None) -> None:
        for ranks in groups:
            ordered.setdefault(GroupSpec(ranks=tuple(ranks), backend=backend))

    need([range(sizes[0])])
    for grid in grids:
        for axes in GROUP_AXES:
            need(grid.groups(axes))
            if second_backend is not None and axes in second_backend_axes:
                need(grid.groups(axes), second_backend)
        need(grid.embedding_groups())
        need(grid.position_embedding_groups())
    need(extra)
    for group in ordered:
        if group.ranks[-1] >= sizes[0]:
            raise ValueError(f"process groups: rank {group.ranks[-1]} is outside the world of {sizes[0]} ranks")
    return GroupPlan(groups=tuple(ordered))


def check_ranks(ranks: Sequence[int]) -> None:
    """Raises ValueError unless ``ranks`` is a non-empty, strictly ascending row of rank numbers.

    torch.distributed sorts the ranks of a group, so another order would not be what was asked for.
    """
    if not ranks or ranks[0] < 0 or any(low >= high for low, high in itertools.pairwise(ranks)):
        raise ValueError(f"process group of ranks {tuple(ranks)}: ranks must be given once each, in ascending order")
