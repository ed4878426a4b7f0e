"""``hotspa train`` with one rank that is killed, stopped or slow as it enters a phase.

python -m tests.integrations.megatron.fault_run '{"rank": 2, ...}' train CONFIG.yaml --ranks 4
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

PHASES = {  # what a rank says it does: a part of it
    "start": "start, building the model",
    "plan": "step {step}, plan",
    "parameter switch": "step {step}, switch",
    "forward": "compute bucket 256 strategy tp2pp2: forward",
    "backward": "compute bucket 256 strategy tp2pp2: backward",
    "flush": "step {step}, flush",
    "optimizer": "step {step}, optimizer",
    "checkpoint write": "step {step}, checkpoint",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """``kind`` is kill, stop or slow (for ``slow_s``); ``struck`` is a file that says when it happened.

    ``phase`` may be ``every``: then the rank is slow once in each.
    """

    kind: str
    phase: str
    rank: int
    step: int
    struck: str
    slow_s: float = 0.0

    def strike(self) -> None:
        Path(self.struck).write_text(str(time.time()))
        if self.kind == "slow":
            time.sleep(self.slow_s)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])


def train_rank(rank, world_size, config, command, *, fault):
    """The function behind ``hotspa train``, with the fault in place on its rank."""
    from hotspa_plugin.integrations.megatron import training_run

    if rank == fault.rank:
        _watch(fault)
    return training_run.train_rank(rank, world_size, config, command)


def _watch(fault: Fault) -> None:
    from hotspa_plugin.integrations.megatron.process import prepare_process

    prepare_process()
    from hotspa_plugin.integrations.megatron import checkpoint, runner, schedule, train_loop, trainer, training_run
    from hotspa_plugin.runtime import activity, bucket_loop

    original = activity.set_activity
    awaited = set(PHASES) if fault.phase == "every" else {fault.phase}

    def set_activity(text: str) -> None:
        original(text)
        in_step = text.startswith(f"step {fault.step}, ")
        for phase in sorted(awaited):
            if PHASES[phase].format(step=fault.step) in text and (in_step or phase == "start"):
                awaited.discard(phase)
                if phase == "checkpoint write":
                    checkpoint.torch.save = functools.partial(_save_half, fault, checkpoint.torch.save)
                else:
                    fault.strike()

    for module in (bucket_loop, runner, schedule, train_loop, trainer, training_run):
        module.set_activity = set_activity


def _save_half(fault, save, state, path) -> None:
    """Half of the file is on disk when the fault strikes."""
    torch.save = save
    whole = io.BytesIO()
    save(state, whole)
    Path(path).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    fault.strike()
    Path(path).write_bytes(whole.getvalue())


def main() -> None:
    from hotspa_plugin.cli import options
    from hotspa_plugin.cli.main import run
    from tests.integrations.megatron.fault_run import Fault, train_rank  # so that ranks find them by this name

    options.TRAIN_RANK = functools.partial(train_rank, fault=Fault(**json.loads(sys.argv[1])))
    sys.exit(run(sys.argv[2:]))


if __name__ == "__main__":
    main()
