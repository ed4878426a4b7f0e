"""What hot switching refuses in a script's flags, and how a refusal ends the start."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator

from hotspa_plugin.strategy import StrategyPool

EXIT_USER_ERROR = 2
# How long the other ranks wait for the launcher to end them, so that rank 0's message comes out first.
_OTHERS_WAIT_S = 10.0


@contextlib.contextmanager
def user_errors(rank: int) -> Iterator[None]:
    """Turns a ValueError inside into one line from rank 0 and exit code 2 on every rank.

    Only for checks that fail on all ranks alike.
    """
    try:
        yield
    except ValueError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_OTHERS_WAIT_S)
        sys.exit(EXIT_USER_ERROR)


def refuse_unsupported(args: argparse.Namespace, pool: StrategyPool) -> None:
    """Raises ValueError for flags that hot switching cannot honour, before Megatron validates them."""
