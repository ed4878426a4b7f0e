"""``hotspa bench``: the group of benchmarks."""

from __future__ import annotations

import click

from hotspa_plugin.cli.bench_switch import switch


@click.group()
def bench() -> None:
    """Measure against named baselines."""


bench.add_command(switch)
