"""Creating process groups once per rank tuple, and none after start."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hotspa_plugin.process_groups.plan import GroupPlan, Ranks, check_ranks


class ProcessGroupRegistry:
    """All process groups of this job, one for each rank tuple, backend and purpose.

    Creating a group is collective over the *whole world*: every rank must ask for the same groups in the
    same order, members or not. ``torch.distributed`` must be initialised before the first one.
    """

    def __init__(self, *, timeout: datetime.timedelta | None = None) -> None:
        """``timeout`` is what groups get that are asked for without one (None: that of the world group)."""
        self._timeout = timeout
        self._groups: dict[tuple[Ranks, str, str], dist.ProcessGroup] = {}
        self._sealed = False

    def get(
        self,
        ranks: Sequence[int],
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        create: Callable[[], dist.ProcessGroup] | None = None,
        purpose: str = "",
    ) -> dist.ProcessGroup:
        """The group of ``ranks`` (ascending), created at the first call and the same object afterwards.

        Those who name a ``purpose`` get a group of their own, to use beside the others at the same time.
        ``backend`` None is the job's own. On a rank outside the group the result is
        ``GroupMember.NON_GROUP_MEMBER``, as from ``torch.distributed.new_group``. ``timeout``
        counts at creation only, and so does ``create``, which makes the group with options of its own.
        Raises RuntimeError for a new group after ``seal``.
        """
        ranks = tuple(int(rank) for rank in ranks)
        check_ranks(ranks)
        backend = backend or dist.get_backend()
        key = (ranks, backend, purpose)
        group = self._groups.get(key)
        if group is not None:
            return group
        if self._sealed:
            raise RuntimeError(
                f"process group of ranks {ranks} over {backend} was asked for after start, when all "
                f"{self.num_groups} groups had been created; add it to the group plan"
            )
        if ranks[-1] >= dist.get_world_size():
            raise ValueError(f"process group of ranks {ranks}: the world has only {dist.get_world_size()} ranks")
        if create is None:
            timeout = timeout or self._timeout or world_timeout()
            create = functools.partial(dist.new_group, list(ranks), backend=backend, timeout=timeout)
        group = create()
        self._groups[key] = group
        return group

    def create_all(self, plan: GroupPlan) -> None:
        """Creates every group of ``plan`` in its order, after all ranks have compared its digest."""
        digests: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, plan.digest())
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise RuntimeError(
                f"process groups: ranks {others} planned other groups than rank 0; "
                "start all ranks with the same pool, order and backends"
            )
        for spec in plan.groups:
            self.get(spec.ranks, backend=spec.backend)

    def warm_up(self) -> None:
        """Runs one tiny all-reduce in each group, in creation order, so that no later call pays for connecting.

        Raises RuntimeError where a group does not add up to its size.
        """
        for (ranks, backend, _), group in self._groups.items():
            if dist.get_rank() not in ranks:
                continue
            device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
            count = torch.ones(1, device=device)
            dist.all_reduce(count, group=group)
            if int(count.item()) != len(ranks):
                raise RuntimeError(
                    f"process group of ranks {ranks} over {backend} answered for {int(count.item())} ranks"
                )

    def seal(self) -> None:
        """From now on a new group is an error."""
        self._sealed = True

    def reopen(self) -> None:
        """Allows new groups again, for another pool in the same process; those made before are shared."""
        self._sealed = False

    @property
    def num_groups(self) -> int:
        """Groups created so far, over the whole world: the same on every rank."""
        return len(self._groups)


@functools.cache
def process_registry() -> ProcessGroupRegistry:
    """The registry of this process, shared by everything in it that builds strategies one after the other."""
    return ProcessGroupRegistry()


def world_timeout() -> datetime.timedelta | None:
    """How long the world group waits for a rank; None where its backend does not tell.

    ``torch.distributed.new_group`` gives other groups half an hour, whatever the job asked for: a rank that stands
    still would go unnoticed that long.
    """
    # torch offers no public way to ask.
    world = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def num_live_groups() -> int:
    """Process groups that this process is a member of, whoever made them, the world included."""
    # torch offers no public count; this table is what destroy_process_group empties.
    return len(dist.distributed_c10d._world.pg_map)
