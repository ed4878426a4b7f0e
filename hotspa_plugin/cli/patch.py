"""``hotspa patch``: our line in a Megatron-LM tree, and the list of what the hooks replace."""

from __future__ import annotations

from pathlib import Path

import click

_tree = click.option(
    "--tree", "--dir", "tree", required=True, type=click.Path(path_type=Path), help="A Megatron-LM tree."
)


@click.group()
def patch() -> None:
    """Add hot switching to the scripts of a Megatron-LM tree, or take it out.

    One import line goes into pretrain_gpt.py; without --hotspa-pool the script does what it did. Scripts
    that must not be touched can be started with: torchrun ... -m hotspa_plugin.launch SCRIPT ...
    """


@patch.command("apply")
@_tree
def apply_patch(tree: Path) -> None:
    """Add the line; a tree that has it already is left as it is."""
    from hotspa_plugin.integrations.megatron import tree_patch

    for file, changed in tree_patch.apply(tree):
        click.echo(f"{tree / file}: {'patched' if changed else 'was patched already'}")


@patch.command("revert")
@_tree
def revert_patch(tree: Path) -> None:
    """Take the line out; a tree without it is left as it is."""
    from hotspa_plugin.integrations.megatron import tree_patch

    for file, changed in tree_patch.revert(tree):
        click.echo(f"{tree / file}: {'restored' if changed else 'was not patched'}")


@patch.command("check")
@_tree
def check_patch(tree: Path) -> None:
    """Say whether the line is in, and exit with 1 where it is not."""
    from hotspa_plugin.integrations.megatron import tree_patch

    states = tree_patch.check(tree)
    click.echo(f"{tree}: Megatron-LM {tree_patch.release_of(tree)}")
    for file, state in states:
        click.echo(f"{tree / file}: {state}")
    if any(state != "applied" for _, state in states):
        raise SystemExit(1)


@patch.command("list")
def list_hooks() -> None:
    """Name every function of Megatron that is replaced once the line is in, and why."""
    from hotspa_plugin.integrations.megatron.megatron_training.hook_table import HOOK_TABLE

    for entry in HOOK_TABLE:
        click.echo(f"{entry.symbol}\n    {entry.why}")
