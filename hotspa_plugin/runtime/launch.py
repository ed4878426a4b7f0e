"""Runs one function on several local ranks, or in process where torchrun has started the ranks already."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from hotspa_plugin.runtime.rank_failure import FailureKind, RankFailure, UserError, explain, report_error
from hotspa_plugin.runtime.rank_process import resolve_target
from hotspa_plugin.runtime.worker_pool import PEER_SETTLE_S, Target, WorkerPool, choose_device

__all__ = ["RankFailure", "UserError", "clean_exit", "in_torchrun", "launch"]


def in_torchrun() -> bool:
    """True where torchrun, or any launcher that sets the same variables, has started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launch(
    function: Target,
    num_ranks: int | None,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 600.0,
    limit_s: float | None = None,
    device: str = "auto",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` on ``num_ranks`` ranks with torch.distributed initialised.

    ``function`` is a module-level function or ``"package.module:function"``; a script that calls
    ``launch`` needs the usual ``if __name__ == "__main__"``. No collective waits longer than
    ``timeout_s``; the whole call ends after ``limit_s`` where given. ``device`` is auto (CUDA with NCCL
    where every rank gets a GPU, else CPU with gloo), cpu or cuda; ``env`` adds environment variables.

    Returns the results in rank order; under torchrun, where ``num_ranks`` may be None, a list with this
    rank's own result. Raises ``RankFailure`` as soon as a rank raises or dies, all other ranks having
    been ended: its message begins with that rank's own error. Wrap the call in ``clean_exit()`` to
    turn failures into messages and exit codes.
    """
    if in_torchrun():
        return [_run_in_process(function, num_ranks, args, timeout_s, device)]
    if num_ranks is None:
        raise UserError("the number of ranks is missing: give it, or start the command under torchrun")
    pool = WorkerPool(
        num_ranks,
        device=device,
        env=env,
        collective_timeout_s=timeout_s,
        call_timeout_s=limit_s,
        settle_s=PEER_SETTLE_S,
    )
    with pool:
        return pool.run_positional(function, [(rank, num_ranks, *args) for rank in range(num_ranks)])


def _run_in_process(function: Target, num_ranks: int | None, args: Sequence[Any], timeout_s: float, device: str) -> Any:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks is not None and num_ranks != world_size:
        raise UserError(
            f"{num_ranks} ranks asked for, but torchrun started {world_size}: make the two equal, or leave one out"
        )
    import torch
    import torch.distributed as dist

    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = choose_device(device, num_local_ranks)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    started_here = not dist.is_initialized()
    if started_here:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        result = resolve_target(function)(rank, world_size, *args)
    except Exception as error:
        # torchrun ends the other ranks; waiting for them here would only hide the error.
        report = report_error(f"rank {rank}", error)
        if report.kind is FailureKind.PEER_LOST and (silent := _silent_ranks(rank, world_size)):
            report = dataclasses.replace(report, summary=f"{silent}. {report.summary}")
        raise RankFailure([report]) from error
    if started_here:
        dist.barrier()  # rank 0 may hold the store that the others still need
        dist.destroy_process_group()
    return result


def _silent_ranks(rank: int, world_size: int) -> str:
    """Who did not answer, in words; the group's own store is asked, since collectives have failed."""
    from torch.distributed.distributed_c10d import _get_default_store

    from hotspa_plugin.runtime import roll_call

    return roll_call.describe(roll_call.silent_ranks(_get_default_store(), rank, world_size))


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Turns failures inside the block into a short message on stderr and an exit code.

    2 and the message alone for what the user can put right; 1 and the failing rank's own error, its
    traceback condensed, for a ``RankFailure``; 130 for Ctrl-C. Other errors are bugs and pass through.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        explained = explain(error)
        if explained is None:
            raise
        code, message = explained
        print(message, file=sys.stderr)
        sys.exit(code)
