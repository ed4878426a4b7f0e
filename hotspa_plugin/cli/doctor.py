"""``hotspa doctor``: what a bug report should begin with, and what keeps this machine from running."""

from __future__ import annotations

import click


@click.command()
@click.option("--quick", is_flag=True, help="Start no ranks.")
def doctor(quick: bool) -> int:
    """Look at this machine and say what is wrong.

    Versions, cores, memory, GPUs, known problems, and whether two ranks can start and talk. Exit code 1
    where something needed is missing.
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
    for finding in doctor_checks.examine(start_ranks=not quick):
        findings.append(finding)
        table.add_row(finding.subject, marks[finding.status], finding.text)
    console.print(table)
    problems = [finding for finding in findings if finding.status == "problem"]
    if problems:
        click.echo(f"problems: {', '.join(finding.subject for finding in problems)}", err=True)
    return 1 if problems else 0
