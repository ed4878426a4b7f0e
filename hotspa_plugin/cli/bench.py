"""``hotspa bench``: the group of benchmarks."""

from __future__ import annotations

import click

from hotspa_plugin.cli.bench_switch import switch
from hotspa_plugin.cli.bench_train import bench_train


@click.group()
def bench() -> None:
    """Measure against named baselines."""


bench.add_command(switch)
bench.add_command(bench_train)
