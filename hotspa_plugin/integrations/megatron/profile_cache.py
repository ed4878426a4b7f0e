"""A profile for planning at start: read where there is one, else measured once and kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hotspa_plugin.cost import ModelSizes, Profile, read_profile
from hotspa_plugin.integrations.megatron.process import prepare_planned_memory
from hotspa_plugin.integrations.megatron.profiling import ProfileRequest, machine_name, measure_profile
from hotspa_plugin.runtime.memory import LARGE_ALLOCATION_BYTES

Measure = Callable[..., Profile]


def obtain_profile(
    path: str | Path | None, request: ProfileRequest, *, tell: Callable[[str], None], measure: Measure = measure_profile
) -> Profile:
    """The profile in ``path`` (None: the user's cache folder), measured and left there where it is missing.

    Collective; the ranks get the same one. ``tell`` is told on rank 0 what happens. ValueError, on every rank, for a
    file that is no profile of this model or does not hold for these ranks; one in the cache folder is replaced.
    """
    prepare_planned_memory()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    place = Path(path) if path is not None else _cache_file(request)
    found: list[tuple[str | None, str | None]] = [(None, None)]  # (profile, error)
    if rank == 0:
        try:
            if place.exists():
                found = [(_checked(place, request.sizes, num_ranks).to_json(), None)]
        except ValueError as error:
            if path is None:  # nobody's file but ours: measured anew
                tell(f"{error}; it is replaced")
            else:
                found = [(None, str(error))]
    dist.broadcast_object_list(found)
    content, problem = found[0]
    if problem:
        raise ValueError(problem)
    if content is not None:
        if rank == 0:
            tell(f"planning with the profile {place}")
        return Profile.model_validate_json(content)
    if rank == 0:
        tell(f"measuring a profile of {request.sizes.name} on {num_ranks} ranks first, once: it is kept in {place}")
    profile = measure(request, progress=lambda said: tell(f"measuring {said}"))
    if rank == 0:
        _write(place, profile, tell)
    return profile


def _checked(place: Path, sizes: ModelSizes, num_ranks: int) -> Profile:
    profile = read_profile(place)
    profile.check_model(sizes)
    profile.check_ranks(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    return profile


def _cache_file(request: ProfileRequest) -> Path:
    """A name that changes with everything that figures depend on."""
    about = {
        "model": request.sizes.model_dump(exclude={"name"}),
        "strategies": sorted(map(str, request.strategies)),
        "lengths": [request.fitted_lengths, request.unseen_lengths],
        "ranks": [dist.get_world_size(), os.environ.get("LOCAL_WORLD_SIZE")],
        "machine": machine_name(),
        "torch": torch.__version__,
        "allocator": LARGE_ALLOCATION_BYTES,
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotspa"
    return folder / f"profile-{digest}.json"


def _write(place: Path, profile: Profile, tell: Callable[[str], None]) -> None:
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(profile.to_json(), encoding="utf-8")
        os.replace(temporary, place)
    except OSError as error:
        tell(f"the profile could not be kept in {place} ({error}); name another place for it")
