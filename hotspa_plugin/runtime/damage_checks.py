"""Checks for damage that nothing else would notice: of copies, of switches, of flushes. Slow, and therefore optional.

A tensor's *fingerprint* is the sum, modulo 2^64, of its elements' bit patterns, each times a number that follows from
the element's place in the global tensor. It does not depend on how the tensor is cut, so that two layouts compare
without moving any parameter, and an element that is changed, lost, doubled or put in another place changes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin.layout import GradientClass, Shard, ShardLayout
from hotspa_plugin.runtime.global_view import shard_view

Tensors = Mapping[str, torch.Tensor]

# Additions in fp32 in another order: the error allowed, relative to the sum of absolute values.
_ROUNDING = 1e-5
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_SHOWN = 5
_WAY_OUT = "Go on from the last checkpoint"


class SilentDamage(RuntimeError):
    """Numbers are not what they must be; the message names the first tensors."""


def fingerprints(layout: ShardLayout, rank: int, local: Tensors, *, when: str) -> dict[str, int]:
    """Of every tensor, the same on all ranks; collective over the world.

    Raises SilentDamage, on every rank, where copies of a region differ in any bit. ``when`` begins its message.
    """
    mine: dict[tuple, int] = {}
    differing = []
    for name, shard in _shards(layout, rank, local):
        key = (name, shard.region.low, shard.region.high)
        found = _fingerprint(shard_view(local[shard.parameter], shard), shard, layout.tensors[shard.tensor].shape)
        if mine.setdefault(key, found) != found:
            differing.append(f"{name} (both on rank {rank})")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, differing))
    first: dict[tuple, tuple[int, int]] = {}
    differing = []
    for other, (digests, own) in enumerate(everyone):
        differing += own
        for key, digest in digests.items():
            holder, expected = first.setdefault(key, (other, digest))
            if digest != expected:
                differing.append(f"{key[0]} (ranks {holder} and {other})")
    if differing:
        raise SilentDamage(f"{when}: copies differ: {_listed(differing)}. {_WAY_OUT}")
    sums: dict[str, int] = {}
    for (name, _, _), (_, digest) in first.items():
        sums[name] = (sums.get(name, 0) + digest) % 2**64
    return sums


def gradient_sums(layout: ShardLayout, rank: int, local: Tensors) -> dict[str, tuple[float, float]]:
    """Of every tensor (signed sum, sum of absolute values) over all that counts once, in fp64; collective.

    The signs follow from an element's place. The first is linear, so that it is carried over exactly, up to rounding,
    when gradients are added somewhere else; the second, a norm, shows what is not finite.
    """
    mine: dict[str, list[float]] = {}
    for name, shard in _shards(layout, rank, local):
        if shard.gradient_class is GradientClass.IDENTICAL and shard.tp_copy:
            continue  # the same gradient once more
        value = shard_view(local[shard.parameter], shard).double()
        signs = 1 - 2 * (_places(shard, layout.tensors[shard.tensor].shape, value.device) >> 17 & 1)
        sums = mine.setdefault(name, [0.0, 0.0])
        sums[0] += float((value * signs).sum())
        sums[1] += float(value.abs().sum())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = dict.fromkeys(name for sums in everyone for name in sums)
    parts = {name: [sums[name] for sums in everyone if name in sums] for name in names}
    return {name: tuple(map(math.fsum, zip(*found, strict=True))) for name, found in parts.items()}


def check_flush(
    before: Mapping[str, tuple[float, float]],
    brought: Mapping[str, tuple[float, float]],
    after: Mapping[str, tuple[float, float]],
    *,
    when: str,
) -> None:
    """Raises SilentDamage where gradients ``after`` a flush are not those at home ``before`` and those ``brought``."""
    for name, (signed, norm) in after.items():
        parts = [before.get(name, (0.0, 0.0)), brought.get(name, (0.0, 0.0))]
        for what, (_, part) in zip(("at home before", "of the strategy"), parts, strict=True):
            if not math.isfinite(part):
                raise SilentDamage(f"{when}: the gradient of {name} {what} is not finite. {_WAY_OUT}")
        expected, scale = math.fsum(s for s, _ in parts), math.fsum(n for _, n in parts)
        if not (math.isfinite(norm) and abs(signed - expected) <= _ROUNDING * scale):
            raise SilentDamage(
                f"{when}: the gradient of {name} did not come home: it adds up to {signed:.9g}, not to {expected:.9g}, "
                f"with a norm of {norm:.9g} after {scale:.9g}. {_WAY_OUT}"
            )


def check_fingerprints(expected: Mapping[str, int], found: Mapping[str, int], *, when: str) -> None:
    """Raises SilentDamage naming the tensors of ``found`` that are not the same as in ``expected``."""
    wrong = [name for name in expected if found.get(name) != expected[name]]
    if wrong:
        raise SilentDamage(f"{when}: parameters are not those of home: {_listed(wrong)}. {_WAY_OUT}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedTensors:
    """A layout and this rank's tensors under it; ``gradients`` of those that are trained."""

    layout: ShardLayout
    parameters: Tensors
    gradients: Tensors


class CheckedSwitcher:
    """A switcher whose switches and flushes are checked; what is not overridden here is the inner one's."""

    def __init__(
        self, inner: Any, *, rank: int, step: int, home: CheckedTensors, other: Callable[[str], CheckedTensors]
    ) -> None:
        """``other(label)`` gives the tensors of another strategy; ``step`` goes into messages."""
        self._inner, self._rank, self._step = inner, rank, step
        self._home, self._other = home, other
        self._at_home: dict[str, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def enter(self, label: str) -> Any:
        """The inner switcher's, after which every copy and every tensor must be as at home."""
        moved = self._inner.enter(label)
        if self._at_home is None:  # parameters change in the optimizer step only
            self._at_home = fingerprints(
                self._home.layout, self._rank, self._home.parameters, when=f"step {self._step}, at home"
            )
        when, there = f"step {self._step}, after the switch to {label}", self._other(label)
        found = fingerprints(there.layout, self._rank, there.parameters, when=when)
        check_fingerprints(self._at_home, found, when=when)
        return moved

    def start_flush(self, label: str, *, beside_home: bool = False) -> None:
        """The inner switcher's whole flush, nothing beside it, after which all gradients must have come home."""
        there = self._other(label)
        before = gradient_sums(self._home.layout, self._rank, self._home.gradients)
        brought = gradient_sums(there.layout, self._rank, there.gradients)
        self._inner.flush(label)
        after = gradient_sums(self._home.layout, self._rank, self._home.gradients)
        check_flush(before, brought, after, when=f"step {self._step}, after the flush from {label}")


def _shards(layout: ShardLayout, rank: int, local: Tensors) -> Iterator[tuple[str, Shard]]:
    for shard in layout.shards(rank):
        if shard.parameter in local:
            yield layout.tensors[shard.tensor].name, shard


def _fingerprint(view: torch.Tensor, shard: Shard, shape: tuple[int, ...]) -> int:
    bits = view.detach().contiguous().view(_BITS[view.element_size()]).to(torch.int64)
    # int64 products wrap around, as wanted.
    return int(((bits + 1) * (_places(shard, shape, view.device) | 1)).sum()) % 2**64


def _places(shard: Shard, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A well-mixed int64 for every element of a shard, from its index in the global tensor; shaped like the region."""
    place = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for dim, (low, high) in enumerate(zip(shard.region.low, shard.region.high, strict=True)):
        along = torch.arange(low, high, dtype=torch.int64, device=device)
        place = place * shape[dim] + along.view([-1 if d == dim else 1 for d in range(len(shape))])
    place = place * -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits
    return place ^ (place >> 29)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
