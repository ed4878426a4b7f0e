"""Which ranks have gone silent: asked by those whose collective failed, where no parent process watches over them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch.distributed as dist

from hotspa_plugin.runtime.activity import current_activity

WAIT_S = 5.0  # for the others, whose own timeouts run out at about the same time
_POLL_S = 0.1


def silent_ranks(store: dist.Store, rank: int, world_size: int, *, wait_s: float = WAIT_S) -> list[int]:
    """Reports this rank as alive in ``store`` and returns those that have not done so within ``wait_s`` seconds.

    A store that is gone, with the rank that held it, answers nothing: then the list is empty.
    """
    keys = [f"hotspa/roll_call/{other}" for other in range(world_size)]
    silent = list(range(world_size))
    with contextlib.suppress(RuntimeError):  # what torch raises where the store's holder is gone
        store.set(keys[rank], current_activity() or "-")
        deadline_s = time.monotonic() + wait_s
        while silent and time.monotonic() < deadline_s:
            silent = [other for other in silent if not store.check([keys[other]])]
            time.sleep(_POLL_S if silent else 0.0)
        return silent
    return []


def describe(silent: Sequence[int]) -> str:
    """One sentence for a message; empty where nobody is silent."""
    if not silent:
        return ""
    names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    return f"nothing was heard of {names}: dead, stopped, or busy elsewhere"
