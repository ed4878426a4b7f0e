"""Which releases of other packages the tests passed with, and which cannot work."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import warnings
from collections.abc import Mapping
from typing import Literal

Release = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tested:
    """``releases`` are those that the tests passed with; older ones than ``least`` are refused, because of ``why``."""

    releases: tuple[Release, ...]
    least: Release = (0, 0)
    why: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{major}.{minor}" for major, minor in self.releases)


TESTED = {
    "python": Tested(releases=((3, 10), (3, 11), (3, 12)), least=(3, 10), why="the code is written for 3.10"),
    "torch": Tested(releases=((2, 13), (2, 14)), least=(2, 6), why="every supported megatron-core asks for 2.6"),
    "megatron-core": Tested(
        releases=((0, 16), (0, 17), (0, 18), (0, 19)), least=(0, 16),
        why="layouts, gradient rules and hooks are written against 0.16 and later",
    ),
    "deepspeed": Tested(releases=((0, 19),)),
    "transformers": Tested(releases=((5, 24), (5, 25))),
    "transformer-engine": Tested(releases=((2, 20),)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """``text`` says what is wrong with a version and the way out; empty where it is tested."""

    status: Literal["tested", "untested", "refused"]
    text: str = ""


def judge(package: str, version: str) -> Verdict:
    """What is known about ``version`` (such as ``2.14.1+cpu``) of one of the packages of ``TESTED``."""
    tested = TESTED[package]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release in tested.releases:
        return Verdict(status="tested")
    if release is not None and release < tested.least:
        return Verdict(
            status="refused",
            text=f"{package} {version} is too old ({tested.why}): install {tested.least[0]}.{tested.least[1]} or "
            f"newer, best one of the tested releases {tested}",
        )
    return Verdict(
        status="untested",
        text=f"{package} {version} is not among the tested releases {tested}: check your setting with 'hotspa verify'",
    )


def check_start(versions: Mapping[str, str]) -> None:
    """Warns (on rank 0) of versions that were not tested. Raises RuntimeError for those that cannot work."""
    for package, version in versions.items():
        verdict = judge(package, version)
        if verdict.status == "refused":
            raise RuntimeError(verdict.text)
        if verdict.status == "untested" and os.environ.get("RANK", "0") == "0":
            warnings.warn(verdict.text, stacklevel=2)


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
