"""Megatron's global arguments as they would be under each strategy of a pool."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hotspa_plugin.integrations.megatron.megatron_training.flags import strategy_flags
from hotspa_plugin.strategy import ParallelStrategy

# Set around every micro-batch, so they are put back after each bucket.
_PER_MICRO_BATCH = ("micro_batch_size", "seq_length")
# Batch sizes of another strategy mean nothing: the plugin owns the batch.
_BATCH_SIZES = ("global_batch_size", "micro_batch_size", "eval_global_batch_size", "eval_micro_batch_size",
                "step_batch_size_schedule")  # fmt: skip
_ABSENT = object()


class StrategyArguments:
    """The differences between one strategy's arguments and home's, put in place while that strategy works."""

    def __init__(self, changes: Mapping[str, Any], get_args: Callable[[], argparse.Namespace]) -> None:
        self.changes = dict(changes)
        self._get_args = get_args

    @contextlib.contextmanager
    def active(self, **more: Any) -> Iterator[argparse.Namespace]:
        """``more`` are further arguments to set meanwhile."""
        args = self._get_args()
        wanted = {**self.changes, **more}
        before = {name: getattr(args, name, _ABSENT) for name in {*wanted, *_PER_MICRO_BATCH}}
        try:
            for name, value in wanted.items():
                setattr(args, name, value)
            yield args
        finally:
            for name, value in before.items():
                if value is _ABSENT:
                    delattr(args, name)
                else:
                    setattr(args, name, value)


def changes_for(
    strategy: ParallelStrategy,
    *,
    parsed: argparse.Namespace,
    home: argparse.Namespace,
    validate: Callable[[argparse.Namespace], Any],
) -> dict[str, Any]:
    """What Megatron's own validation makes different under ``strategy``.

    ``parsed`` are the arguments before validation, ``home`` the validated ones of the home strategy.
    """
    args = copy.deepcopy(parsed)
    for name, value in strategy_flags(strategy, args).items():
        setattr(args, name, value)
    # Sizes that any data-parallel size divides: the real batch is split by the plugin.
    for name in _BATCH_SIZES:
        if hasattr(args, name):
            setattr(args, name, 1 if name == "micro_batch_size" else None)
    with contextlib.redirect_stdout(io.StringIO()):
        validate(args)
    return {
        name: value
        for name, value in vars(args).items()
        if name not in _BATCH_SIZES and not _same(value, getattr(home, name, _ABSENT))
    }


def _same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (RuntimeError, ValueError):  # tensors and arrays compare element by element
        return left is right
