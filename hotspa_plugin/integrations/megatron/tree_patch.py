"""Adding our one line to the scripts of a Megatron-LM tree, and taking it out again.

The patches hold no line of Megatron's, so they say only where the line goes; before anything is written the line above
is checked to be the one that the patch was made for.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

import hotspa_plugin

ANCHOR = "import torch"
State = Literal["applied", "not applied", "unknown"]
_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,\d+)? @@")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Insertion:
    """``lines`` go behind line ``after_line`` (from 1) of ``file``, which must be ``ANCHOR``."""

    file: str
    after_line: int
    lines: tuple[str, ...]


def patches_folder() -> Path:
    """Where the patches lie: in the installed package, or beside it in a source tree."""
    package = Path(hotspa_plugin.__file__).parent
    inside = package / "patches"
    return (inside if inside.is_dir() else package.parent / "patches") / "megatron-lm"


def supported_releases() -> list[str]:
    """Releases that there are patches for, such as ``0.19``."""
    return sorted(path.parent.name for path in patches_folder().glob("*/hotspa.patch"))


def release_of(tree: Path) -> str:
    """The release of a Megatron-LM tree. Raises ValueError where it is none, or one without a patch."""
    info = tree / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise ValueError(f"--tree {tree}: is no Megatron-LM tree (it has no megatron/core/package_info.py)")
    numbers = dict(re.findall(r"^(MAJOR|MINOR)\s*=\s*(\d+)", info.read_text(encoding="utf-8"), re.MULTILINE))
    release = f"{numbers.get('MAJOR', '?')}.{numbers.get('MINOR', '?')}"
    if release not in supported_releases():
        raise ValueError(
            f"--tree {tree}: is Megatron-LM {release}, and there are patches for "
            f"{', '.join(supported_releases())}: use one of these, or start the script with "
            "python -m hotspa_plugin.launch"
        )
    return release


def read_patch(release: str) -> list[Insertion]:
    """The insertions of one release's patch. Raises ValueError where the file is anything but insertions."""
    path = patches_folder() / release / "hotspa.patch"
    insertions: list[Insertion] = []
    file = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif hunk := _HUNK.fullmatch(line):
            insertions.append(Insertion(file=file, after_line=int(hunk[1]), lines=()))
        elif line.startswith("+") and insertions:
            insertions[-1] = dataclasses.replace(insertions[-1], lines=(*insertions[-1].lines, line[1:]))
        elif not line.startswith("--- a/"):
            raise ValueError(f"{path}: {line!r} is no insertion: install hotspa_plugin again")
    return insertions


def state_of(tree: Path, insertion: Insertion) -> State:
    """Whether the lines are in place; ``unknown`` where the file is not as the patch expects it."""
    lines = _read(tree, insertion)
    at = insertion.after_line
    if lines[at - 1 : at] != [ANCHOR]:
        return "unknown"
    if lines[at : at + len(insertion.lines)] == list(insertion.lines):
        return "applied"
    return "unknown" if any(line in lines for line in insertion.lines) else "not applied"


def apply(tree: Path) -> list[tuple[str, bool]]:
    """Adds the lines where they are missing; returns each file and whether it was changed.

    Raises ValueError, with nothing written, where some file is not as expected.
    """
    return _change(tree, "applied")


def revert(tree: Path) -> list[tuple[str, bool]]:
    """Takes the lines out where they are; as for :func:`apply`."""
    return _change(tree, "not applied")


def check(tree: Path) -> list[tuple[str, State]]:
    """The state of each file."""
    return [(insertion.file, state_of(tree, insertion)) for insertion in read_patch(release_of(tree))]


def _change(tree: Path, wanted: State) -> list[tuple[str, bool]]:
    insertions = read_patch(release_of(tree))
    states = [state_of(tree, insertion) for insertion in insertions]
    for insertion, state in zip(insertions, states, strict=True):
        if state == "unknown":
            raise ValueError(
                f"{tree / insertion.file}: line {insertion.after_line} is not {ANCHOR!r} as in the release, so "
                "the patch does not fit: add the line 'import hotspa_plugin.megatron_adaptor' below it by "
                "hand, or start the script with python -m hotspa_plugin.launch"
            )
    changed = []
    for insertion, state in zip(insertions, states, strict=True):
        if state != wanted:
            path, at = tree / insertion.file, insertion.after_line
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            if wanted == "applied":
                lines[at:at] = [line + "\n" for line in insertion.lines]
            else:
                del lines[at : at + len(insertion.lines)]
            path.write_text("".join(lines), encoding="utf-8")
        changed.append((insertion.file, state != wanted))
    return changed


def _read(tree: Path, insertion: Insertion) -> list[str]:
    path = tree / insertion.file
    if not path.is_file():
        raise ValueError(f"--tree {tree}: has no {insertion.file}")
    return path.read_text(encoding="utf-8").splitlines()
