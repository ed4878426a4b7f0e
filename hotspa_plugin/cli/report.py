"""``hotspa report``. Calls ``WRITE_REPORT``: ``write_report(directory, output=None) -> Path``."""

from __future__ import annotations

from pathlib import Path

import click

from hotspa_plugin.cli import options


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page to write.  [default: report.html in DIR]")
@click.option("--force", is_flag=True, help="Let --out write over a file that is there.")
def report(directory: Path, out: Path | None, force: bool) -> None:
    """Make one HTML page out of a run's records.

    Length histogram with the bounds, a timeline of one step per rank, loss, tokens per second, bytes moved
    and memory, in one page that needs nothing else.
    """
    from hotspa_plugin.runtime.rank_process import resolve_target

    if not directory.exists():
        raise ValueError(f"{directory}: there is no such folder; name one that a run wrote, such as runs/demo")
    if not directory.is_dir():
        raise ValueError(f"{directory}: is a file; name the folder of a run")
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out}: is a folder; name a file in it")
        if out.exists() and not force:
            raise ValueError(f"--out {out}: is there already; choose another name or add --force")
    click.echo(resolve_target(options.WRITE_REPORT)(directory, out))
