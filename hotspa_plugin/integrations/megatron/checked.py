"""Checks every switch and flush of one batch for silent damage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from hotspa_plugin.integrations.megatron.strategy_modules import StrategyModules
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.runtime.bucket_loop import BucketLoop
from hotspa_plugin.runtime.damage_checks import CheckedSwitcher, CheckedTensors


@contextlib.contextmanager
def checked_switches(loop: BucketLoop, home: StrategyModules, home_layout: ShardLayout, *, step: int) -> Iterator[None]:
    """Inside the block ``loop`` raises SilentDamage, on every rank, naming the first tensors that are damaged."""
    switcher = loop.switcher
    modules = {runner.label: runner.modules for runner in loop.runners}
    loop.switcher = CheckedSwitcher(
        switcher,
        rank=dist.get_rank(),
        step=step,
        home=_tensors(home, home_layout),
        other=lambda label: _tensors(modules[label], switcher.layout(label)),
    )
    try:
        yield
    finally:
        loop.switcher = switcher


def _tensors(modules: StrategyModules, layout: ShardLayout) -> CheckedTensors:
    parameters = modules.parameters
    return CheckedTensors(
        layout=layout,
        parameters={name: p.data for name, p in parameters.items()},
        gradients={name: p.main_grad for name, p in parameters.items() if p.requires_grad},
    )
