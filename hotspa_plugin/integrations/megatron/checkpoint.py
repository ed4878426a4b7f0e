"""Saving a run at a step and going on from there: one file per rank, whole before it counts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from hotspa_plugin.integrations.megatron.trainer import Trainer

_LATEST = "latest"
_ABOUT = "checkpoint.json"


def save(folder: Path, step: int, trainer: Trainer, about: dict[str, Any]) -> Path:
    """Writes ``folder/step-<step>``; collective over the world.

    ``about`` (JSON-able) tells what the checkpoint belongs to. A save that is interrupted leaves the previous
    checkpoint in force: files are written beside it, and named the latest when all ranks are done.
    """
    name = f"step-{step:08d}"
    final, unfinished = folder / name, folder / f".unfinished-{name}"
    if trainer.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    torch.save(_state_of(trainer), unfinished / f"rank-{trainer.rank:05d}.pt")
    dist.barrier()
    if trainer.rank == 0:
        (unfinished / _ABOUT).write_text(json.dumps({**about, **_identity(trainer), "step": step}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        pointer = folder / f".{_LATEST}"
        pointer.write_text(name)
        os.replace(pointer, folder / _LATEST)
    dist.barrier()
    return final


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in ``folder``, or None."""
    try:
        return folder / (folder / _LATEST).read_text().strip()
    except FileNotFoundError:
        return None


def read_about(checkpoint: Path) -> dict[str, Any]:
    """What :func:`save` was told of ``checkpoint``, its step included. ValueError where it is not readable."""
    try:
        return json.loads((checkpoint / _ABOUT).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"checkpoint {checkpoint} cannot be read ({error}): name another one, or start afresh"
        ) from None


def load(checkpoint: Path, trainer: Trainer) -> None:
    """Restores ``trainer`` from ``checkpoint``; every rank reads its own file.

    Raises ValueError where the checkpoint belongs to another home, world size or model.
    """
    about, here = read_about(checkpoint), _identity(trainer)
    for key, what in (("home", "home strategy"), ("world_size", "number of ranks"), ("home_layout", "model")):
        if about.get(key) != here[key]:
            shown = f" ({about.get(key)} there, {here[key]} here)" if key != "home_layout" else ""
            raise ValueError(
                f"checkpoint {checkpoint} was written by another {what}{shown}: resume with the one it was written "
                "by, or start a new run with --out"
            )
    state = torch.load(checkpoint / f"rank-{trainer.rank:05d}.pt", weights_only=True)
    with torch.no_grad():
        for name, parameter in trainer.home.parameters.items():
            parameter.data.copy_(state["parameters"][name])
        for inner, saved in zip(_inner_optimizers(trainer.optimizer), state["optimizers"], strict=True):
            inner.load_state_dict(saved["state"])
            for master, value in zip(_masters(inner), saved["masters"], strict=True):
                master.copy_(value)
    trainer.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random_state"])


def _state_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "parameters": {name: parameter.data for name, parameter in trainer.home.parameters.items()},
        "optimizers": [
            {"state": inner.state_dict(), "masters": [master.detach() for master in _masters(inner)]}
            for inner in _inner_optimizers(trainer.optimizer)
        ],
        "scheduler": trainer.scheduler.state_dict(),
        "random_state": torch.get_rng_state(),
    }


def _identity(trainer: Trainer) -> dict[str, Any]:
    return {
        "home": trainer.home.label,
        "world_size": dist.get_world_size(),
        "home_layout": trainer.home_layout.digest(),
    }


def _inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's; their parameters are this rank's fp32 master shards."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner.optimizer for inner in chained if inner.optimizer is not None]


def _masters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
