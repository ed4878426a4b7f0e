"""The command ``hotspa``: its subcommands, and how every failure ends in one clear message and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

import click

from hotspa_plugin import __version__
from hotspa_plugin.cli.bench import bench
from hotspa_plugin.cli.demo import demo
from hotspa_plugin.cli.doctor import doctor
from hotspa_plugin.cli.fuzz import fuzz
from hotspa_plugin.cli.patch import patch
from hotspa_plugin.cli.plan import plan
from hotspa_plugin.cli.profile import profile
from hotspa_plugin.cli.report import report
from hotspa_plugin.cli.simulate import simulate
from hotspa_plugin.cli.train import train
from hotspa_plugin.cli.verify import verify
from hotspa_plugin.runtime.rank_failure import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, explain


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order in which one meets them, not the alphabet's

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(self.commands)}"
            raise click.UsageError(f"there is no command {args[0]}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: hotspa demo",
)
@click.version_option(__version__, "--version", message="hotspa %(version)s")
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Train one model under several parallel strategies inside one optimizer step.

    Every global batch is split by sequence length; short sequences run data parallel, long ones tensor
    and pipeline parallel, and parameters and gradients are hot-switched in between. The gradient is that
    of the same batch under one strategy: `hotspa verify` measures it.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (demo, train, verify, fuzz, report, doctor, profile, plan, simulate, bench, patch):
    commands.add_command(_command)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


def run(args: Sequence[str] | None = None) -> int:
    """Runs the command line ``args`` (default: the process's) and returns its exit code.

    0: done; 1: failed, or verified to be wrong; 2: something the user can put right; 130: Ctrl-C.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        # obj: the arguments as they came, for command_line() in the records of a run.
        result = commands.main(args=args, prog_name="hotspa", standalone_mode=False, obj=args)
    except click.UsageError as error:
        return _complain(f"{error.format_message()} (see {_help_command(error.ctx)})")
    except click.ClickException as error:
        return _complain(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise  # a bug: its traceback is wanted
        code, message = explained
        print(message, file=sys.stderr)
        return code
    return result if isinstance(result, int) else 0


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


def _help_command(ctx: click.Context | None) -> str:
    return f"{ctx.command_path if ctx is not None else 'hotspa'} --help"
