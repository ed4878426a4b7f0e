"""One parallel strategy, and how it is written: ``tp4pp2``, ``tp2nosp``, ``tp1rc``."""

from __future__ import annotations

import dataclasses
import math
import re

RECOMPUTE_SUFFIXES = {"none": "", "selective": "rcs", "full": "rc"}
_SUFFIX_RECOMPUTE = {suffix: mode for mode, suffix in RECOMPUTE_SUFFIXES.items() if suffix}
_TOKEN = re.compile(r"(?P<axis>tp|pp|dp|cp|ep|vpp)(?P<size>\d+)|(?P<suffix>rcs|rc|nosp)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """How a model and its batch are split over all ranks.

    ``tp``, ``pp``, ``dp``, ``cp`` and ``ep`` are the sizes of tensor, pipeline, data, context and expert
    parallelism, ``vpp`` the number of interleaved model chunks per pipeline stage. ``sp`` is
    Megatron's sequence parallelism; left at None it is on where ``tp`` > 1. ``recompute`` says which
    activations the backward pass computes anew. ``dp`` is None until ``resolve`` derives it from
    the number of ranks.
    """

    tp: int = 1
    sp: bool | None = None
    pp: int = 1
    dp: int | None = None
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "ep", "vpp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"strategy: {axis} is {getattr(self, axis)}, but must be at least 1")
        if self.dp is not None and self.dp < 1:
            raise ValueError(f"strategy: dp is {self.dp}, but must be at least 1")
        if self.recompute not in RECOMPUTE_SUFFIXES:
            raise ValueError(f"strategy: recompute {self.recompute!r} is not one of {', '.join(RECOMPUTE_SUFFIXES)}")
        if self.sp is None:
            object.__setattr__(self, "sp", self.tp > 1)
        if self.sp and self.tp == 1:
            raise ValueError("strategy: sequence parallelism (sp) needs tp > 1, but tp is 1; leave sp out")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"strategy: vpp {self.vpp} needs pp > 1, but pp is 1; leave vpp out")

    @classmethod
    def parse(cls, spec: str) -> ParallelStrategy:
        """Reads ``tp4pp2`` and its like: axes with their sizes, then suffixes.

        Axes are tp, pp, dp, cp, ep and vpp, in any order, 1 where left out; suffixes are ``rc`` (full
        recomputation), ``rcs`` (selective) and ``nosp`` (sequence parallelism off). Raises ValueError
        that names the first character which fits nothing.
        """
        fields: dict[str, int | bool | str] = {}
        position = 0
        while position < len(spec):
            match = _TOKEN.match(spec, position)
            if match is None:
                raise ValueError(
                    f"strategy {spec!r}: {spec[position:]!r} at character {position + 1} is not understood; "
                    "write sizes such as tp4pp2 (tp, pp, dp, cp, ep, vpp), then rc, rcs or nosp"
                )
            if match["axis"]:
                name, value = match["axis"], int(match["size"])
            elif match["suffix"] == "nosp":
                name, value = "sp", False
            else:
                name, value = "recompute", _SUFFIX_RECOMPUTE[match["suffix"]]
            if name in fields:
                raise ValueError(
                    f"strategy {spec!r}: {match[0]!r} at character {position + 1} sets {name} a second time"
                )
            fields[name] = value
            position = match.end()
        if not fields:
            raise ValueError(
                "strategy: the text is empty; write tp1 for pure data parallelism, or sizes such as tp4pp2"
            )
        if fields.get("sp") is False and fields.get("tp", 1) == 1:
            raise ValueError(f"strategy {spec!r}: nosp needs tp > 1, where sequence parallelism is on; leave it out")
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(str(error).replace("strategy:", f"strategy {spec!r}:", 1)) from None

    def __str__(self) -> str:
        """The strategy as ``parse`` reads it, without dp, which follows from the number of ranks."""
        sizes = "".join(
            f"{axis}{size}" for axis in ("tp", "pp", "vpp", "cp", "ep") if (size := getattr(self, axis)) > 1
        )
        suffix = "nosp" if self.tp > 1 and not self.sp else ""
        return (sizes or "tp1") + suffix + RECOMPUTE_SUFFIXES[self.recompute]

    @property
    def num_ranks_per_replica(self) -> int:
        """Ranks that hold one replica of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    def resolve(self, world_size: int) -> ParallelStrategy:
        """This strategy with dp set so that all ``world_size`` ranks are used.

        Raises ValueError where they cannot be, or where an explicit dp, or ep, contradicts it.
        """
        if world_size < 1:
            raise ValueError(f"world size is {world_size}, but must be at least 1")
        replica = self.num_ranks_per_replica
        if world_size % replica:
            below = world_size // replica * replica
            fits = " or ".join(str(size) for size in (below, below + replica) if size)
            raise ValueError(
                f"strategy {self}: tp*pp*cp = {replica} does not divide the world size {world_size}; "
                f"use {fits} ranks, or a strategy whose tp*pp*cp is {_one_of(divisors(world_size))}"
            )
        dp = world_size // replica
        if self.dp not in (None, dp):
            raise ValueError(
                f"strategy {self}: dp{self.dp} needs {self.dp * replica} ranks, but the world size is {world_size}, "
                f"where dp is {dp}; leave dp out or write dp{dp}"
            )
        if (dp * self.cp * self.tp) % self.ep:
            raise ValueError(
                f"strategy {self}: ep{self.ep} does not divide the {dp * self.cp * self.tp} ranks of a pipeline stage; "
                f"use ep {_one_of(divisors(dp * self.cp * self.tp))}"
            )
        return dataclasses.replace(self, dp=dp)


def refuse_unsupported(strategy: ParallelStrategy, *, interleaved: bool = False) -> None:
    """Raises ValueError for the axes that a strategy can name but that cannot run yet.

    ``interleaved`` tells that the caller runs interleaved pipelines (vpp).
    """
    meanings = {"cp": "context parallelism", "ep": "expert parallelism", "vpp": "interleaved pipeline chunks"}
    for axis, meaning in meanings.items():
        if (size := getattr(strategy, axis)) > 1 and not (axis == "vpp" and interleaved):
            raise ValueError(f"strategy {strategy}: {meaning} ({axis}{size}) is not supported yet; leave {axis} out")


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _one_of(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
