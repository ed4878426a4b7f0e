"""What a test's ranks do: run the example script, once per call, and write down what happened."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[3] / "examples" / "megatron" / "pretrain_gpt.py"


def pretrain(
    argv: list[str],
    folder: str | None = None,
    start: str | None = None,
    script: str = str(SCRIPT),
    fault: str | None = None,
    hooks: bool = True,
) -> dict[str, Any]:
    """Runs ``script`` with ``argv``, as a launcher would.

    Returns, from every rank, exact losses and gradient norms of all iterations, validation losses and the exit code.
    ``start`` names a file of whole parameters by name: the run starts from it, or writes it if it is missing. With
    ``folder`` rank 0 leaves ``gradients.pt`` (of the first iteration) and ``parameters.pt`` (after the last) there.
    ``fault`` names one of ``faults.FAULTS``, wrong on purpose. Without ``hooks`` Megatron is stock (and so must the
    script be that runs it).
    """
    os.environ.update(
        RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=str(dist.get_rank()),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )  # fmt: skip
    from hotspa_plugin.integrations.megatron.megatron_training import cpu

    cpu.enable()
    from hotspa_plugin.integrations.megatron.megatron_training import refusals

    refusals._OTHERS_WAIT_S = 0.0  # no launcher ends these ranks early
    import hotspa_plugin.megatron_adaptor  # noqa: F401
    from hotspa_plugin.integrations.megatron.megatron_training import inventory
    from tests.integrations.megatron_training import faults
    from tests.integrations.megatron_training.recorder import Recorder

    (inventory.install if hooks else inventory.remove)()
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    before = sys.argv
    sys.argv = [script, *argv]
    recorder = Recorder(folder=folder, start=start)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), recorder, faults.active(fault):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = before
        forget_run()
        inventory.install()
    return {"code": code, "losses": recorder.losses, "grad_norms": recorder.grad_norms, "copies": recorder.differing,
            "validation": recorder.validation,
            "output": output.getvalue(), "errors": _plain(errors.getvalue())}  # fmt: skip


def _plain(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not re.search("warn", line, re.IGNORECASE))


def forget_run() -> None:
    """Undoes the global state of one ``pretrain()``, so that the process can run another."""
    import gc

    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    from hotspa_plugin.integrations.megatron import parallel_state
    from hotspa_plugin.integrations.megatron.megatron_training import hot_run

    global_vars.unset_global_variables()
    unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    hot_run.begin(None)
    parallel_state.reset()
    gc.collect()
    torch.distributed.barrier()


def inventory_symbols() -> list[tuple[str, bool]]:
    """Every hooked function and whether its place holds the wrapper; then, once more, after removing the hooks."""
    import importlib

    from hotspa_plugin.integrations.megatron.megatron_training import cpu, hooks, inventory

    cpu.enable()

    def state() -> list[tuple[str, bool]]:
        return [
            (hook.symbol, hooks.is_hooked(getattr(importlib.import_module(hook.module), hook.name)))
            for hook in inventory.inventory()
        ]

    inventory.install()
    installed = state()
    inventory.remove()
    removed = state()
    inventory.install()
    return [*installed, *removed]
