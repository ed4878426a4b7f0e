"""Writes down exact numbers of a run of ``megatron.training``, hot or stock, from outside of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import training

from hotspa_plugin.cpu.patches import PatchSet
from hotspa_plugin.integrations.megatron import layout_reader
from hotspa_plugin.integrations.megatron.home import gather_reduced_gradients
from hotspa_plugin.runtime.global_view import gather_global, load_global
from hotspa_plugin.runtime.layout_gathering import gather_layout


class Recorder:
    """While it is entered, ``megatron.training`` runs as ever and is watched."""

    def __init__(self, *, folder: str | None, start: str | None) -> None:
        self._folder = Path(folder) if folder else None
        self._start = Path(start) if start else None
        self._patches = PatchSet()
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.validation: list[float] = []
        self.differing: list[str] = []
        self._model: list = []
        self._layout: Any = None

    def __enter__(self) -> Recorder:
        self._wrap("setup_model_and_optimizer", self._after_setup)
        self._wrap("train_step", self._after_step)
        self._wrap("evaluate", self._after_evaluation)
        self._wrap("train", self._after_training)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patches.restore()

    def _wrap(self, name: str, after: Any) -> None:
        original = getattr(training, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            after(result)
            return result

        self._patches.replace(training, name, wrapped)

    def _after_setup(self, result: tuple) -> None:
        self._model, optimizer, _ = result
        bare = unwrap_model(self._model)
        config = get_model_config(self._model[0])
        from megatron.core import mpu

        dp_rank = mpu.get_data_parallel_rank()
        self._layout = gather_layout("recorded", layout_reader.read_rank(bare, config, dp_rank), dp_rank)
        self._parameters = layout_reader.named_parameters(bare)
        if self._start is not None:
            self._start_from(self._start, optimizer)
        step = optimizer.step

        def watched_step() -> Any:
            if self._folder is not None and not self.losses and not self._folder.joinpath("gradients.pt").exists():
                self._save_gradients()
            return step()

        optimizer.step = watched_step

    def _start_from(self, path: Path, optimizer: Any) -> None:
        local = {name: p.data for name, p in self._parameters.items()}
        exists = path.exists()
        dist.barrier()
        if exists:
            load_global(self._layout, dist.get_rank(), torch.load(path), local)
            optimizer.reload_model_params()
        else:
            whole, _ = gather_global(self._layout, dist.get_rank(), local)
            if whole is not None:
                torch.save(whole, path)
        dist.barrier()

    def _save_gradients(self) -> None:
        if self._model[0].ddp_config.use_distributed_optimizer:
            gather_reduced_gradients(self._model, self._model[0].dp_cp_group)
        gradients = {n: p.main_grad for n, p in self._parameters.items() if p.requires_grad}
        whole, differing = gather_global(self._layout, dist.get_rank(), gradients)
        self.differing += differing
        if whole is not None:
            torch.save(whole, self._folder / "gradients.pt")

    def _after_step(self, result: tuple) -> None:
        loss = result[0].get("lm loss")
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if loss is None else loss.item())
        # Only last stages report one; none does where Megatron skipped a step whose gradients are not finite.
        told = {str(value): value for value in everyone if value is not None} or {"nan": math.nan}
        assert len(told) == 1, f"ranks report different losses: {everyone}"
        self.losses += told.values()
        self.grad_norms.append(math.nan if result[5] is None else float(result[5]))

    def _after_evaluation(self, result: tuple) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        loss = (result[0] or {}).get("lm loss")
        dist.all_gather_object(everyone, None if loss is None else loss.item())
        self.validation.append(next(value for value in reversed(everyone) if value is not None))

    def _after_training(self, result: Any) -> None:
        if self._folder is None:
            return
        whole, differing = gather_global(
            self._layout, dist.get_rank(), {n: p.data for n, p in self._parameters.items()}
        )
        self.differing += differing
        if whole is not None:
            torch.save(whole, self._folder / "parameters.pt")
