"""``hotspa bench``: the group of benchmarks."""

from __future__ import annotations

import click

from hotspa_plugin.cli.bench_switch import switch
from hotspa_plugin.cli.bench_train import bench_train


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure against named baselines."""
    if ctx.invoked_subcommand is None:
        raise click.UsageError(f"name a benchmark: {' or '.join(ctx.command.commands)}", ctx)


bench.add_command(switch)
bench.add_command(bench_train)
