"""What a checkpoint says of the run that saved it, beside DeepSpeed's own state."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Sequence
from typing import Any

import torch

CLIENT_STATE = "hotspa"  # the key in DeepSpeed's client state
# DeepSpeed's files of the first rank's state: ZeRO 0 to 2, and ZeRO 3.
STATE_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What must agree between the run that saved a checkpoint and the one that loads it."""

    home: str
    zero_stage: int
    shapes: dict[str, tuple[int, ...]]  # of whole parameters, by name


def check_checkpoint(folder: str | os.PathLike[str], tag: str | None, *, run: SavedRun, with_optimizer: bool) -> None:
    """Raises ValueError where ``run`` cannot load the checkpoint ``tag`` (None: the latest) of ``folder``.

    DeepSpeed itself would find out halfway, with some parameters changed already. A folder without a latest
    checkpoint, and one saved without hot switching, are left to DeepSpeed.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"load_checkpoint: expected a folder, got {folder!r}")
    if tag is None:
        latest = os.path.join(folder, "latest")
        if not os.path.isfile(latest):
            return
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
    name = os.path.join(folder, str(tag))
    paths = [path for path in (os.path.join(name, file) for file in STATE_FILES) if os.path.isfile(path)]
    if not paths:
        tags = _tags(folder)
        there = f"it has {', '.join(tags)}" if tags else "it has none"
        raise ValueError(f"load_checkpoint: {folder} has no checkpoint {tag}: {there}")
    saved = torch.load(paths[0], map_location="cpu", weights_only=False, mmap=True).get(CLIENT_STATE)
    if saved is not None:
        _compare(name, saved, run, with_optimizer)


def _tags(folder: str | os.PathLike[str]) -> Sequence[str]:
    found = [
        path for file in STATE_FILES for path in glob.glob(os.path.join(glob.escape(os.fspath(folder)), "*", file))
    ]
    return sorted({os.path.basename(os.path.dirname(path)) for path in found})


def _compare(name: str, saved: dict[str, Any], run: SavedRun, with_optimizer: bool) -> None:
    weights = "start from its exported weights (save_pretrained, or gather_parameters)"
    if saved["home"] != run.home:
        raise ValueError(
            f"checkpoint {name} was saved with home {saved['home']}, this run has home {run.home}: set hotspa.home "
            f"to {saved['home']}, or {weights}"
        )
    for parameter in [*run.shapes, *saved["shapes"]]:
        there, here = saved["shapes"].get(parameter), run.shapes.get(parameter)
        if there != here:
            said = [f"no {parameter}" if shape is None else f"{parameter} of shape {shape}" for shape in (there, here)]
            raise ValueError(f"checkpoint {name} is of another model: it has {said[0]}, this run has {said[1]}")
    # ZeRO 1 and 2 keep the same state in the same files; the others keep it elsewhere, and ZeRO 3 the weights too.
    there, here = saved["zero_stage"], run.zero_stage
    if there != here and {there, here} != {1, 2} and (with_optimizer or 3 in (there, here)):
        raise ValueError(
            f"checkpoint {name} was saved at ZeRO stage {there}, this run is at {here}: set zero_optimization.stage "
            f"to {there}, or {weights}"
        )
