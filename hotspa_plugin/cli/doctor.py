"""``hotspa doctor``: what a bug report should begin with, and what keeps this machine from running."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("deepspeed_config", required=False, metavar="[DS_CONFIG.json]", type=click.Path(path_type=Path))
@click.option("--ranks", "num_ranks", type=click.IntRange(min=1), metavar="N", help="Ranks that the pool must fit.")
@click.option("--quick", is_flag=True, help="Start no ranks.")
def doctor(deepspeed_config: Path | None, num_ranks: int | None, quick: bool) -> int:
    """Look at this machine, or at a DeepSpeed configuration, and say what is wrong.

    Without a configuration: versions, cores, memory, GPUs, known problems, and whether two ranks can start
    and talk. With one: whether hot switching would be active under it, and what would be refused. Exit code 1
    where something needed is missing or refused.
    """
    from rich.console import Console
    from rich.table import Table

    from hotspa_plugin.cli import doctor_checks

    console = Console(highlight=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
    findings = []
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    if deepspeed_config is not None:
        from hotspa_plugin.integrations.deepspeed.doctor import examine_config

        examined = examine_config(deepspeed_config, num_ranks=num_ranks)
    else:
        examined = doctor_checks.examine(start_ranks=not quick)
    for finding in examined:
        findings.append(finding)
        table.add_row(finding.subject, marks[finding.status], finding.text)
    console.print(table)
    problems = [finding for finding in findings if finding.status == "problem"]
    if problems:
        click.echo(f"problems: {', '.join(finding.subject for finding in problems)}", err=True)
    return 1 if problems else 0
