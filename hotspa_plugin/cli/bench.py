"""``hotspa bench``: measurements against baselines."""

from __future__ import annotations

import click

from hotspa_plugin.cli.bench_train import bench_train


@click.group()
def bench() -> None:
    """Measure against baselines."""


bench.add_command(bench_train)
