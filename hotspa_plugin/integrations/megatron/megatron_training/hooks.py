"""Replacing functions of Megatron, reversibly: an inventory of hooks, each with its reason and known signatures."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MARKER = "__hotspa_original__"
SUPPORTED = ("0.16", "0.17", "0.18", "0.19")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    """One function of Megatron that is wrapped.

    ``wrap(original)`` returns the replacement. ``signatures`` maps a release to the parameter names that the wrapper
    was written against. ``everywhere`` also rebinds modules that imported the function by name.
    """

    module: str
    name: str
    why: str
    wrap: Callable[[Callable], Callable]
    signatures: Mapping[str, Sequence[str]]
    everywhere: bool = True

    @property
    def symbol(self) -> str:
        return f"{self.module}.{self.name}"


class HookSet:
    """Hooks that are installed together and removed together."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = tuple(hooks)
        self._rebound: list[tuple[Any, str, Any]] = []

    @property
    def installed(self) -> bool:
        return bool(self._rebound)

    def install(self, release: str) -> None:
        """Checks every hook against ``release`` (such as ``0.19``), then puts all in place; once is enough.

        Raises RuntimeError, with nothing replaced, where Megatron is not what a hook was written for.
        """
        if self.installed:
            return
        originals = [_checked(hook, release) for hook in self.hooks]
        for hook, original in zip(self.hooks, originals, strict=True):
            replacement = hook.wrap(original)
            setattr(replacement, _MARKER, original)
            for module in self._owners(hook, original):
                self._rebound.append((module, hook.name, original))
                setattr(module, hook.name, replacement)

    def _owners(self, hook: Hook, original: Callable) -> list[Any]:
        owners = [importlib.import_module(hook.module)]
        if hook.everywhere:
            # Whoever imported it by name has a binding of its own.
            owners += [
                m for m in list(sys.modules.values()) if m not in owners and vars_of(m).get(hook.name) is original
            ]
        return owners

    def remove(self) -> None:
        """Puts every function back."""
        while self._rebound:
            module, name, original = self._rebound.pop()
            setattr(module, name, original)


def vars_of(module: Any) -> dict[str, Any]:
    """The module's namespace; empty for the odd things that sys.modules may hold."""
    return getattr(module, "__dict__", None) or {}


def is_hooked(function: Callable) -> bool:
    """Whether ``function`` is one of our replacements."""
    return hasattr(function, _MARKER)


def original_of(function: Callable) -> Callable:
    """What ``function`` replaced, or itself."""
    return getattr(function, _MARKER, function)


def megatron_release() -> str:
    """The release of megatron-core, such as ``0.19``. Raises RuntimeError outside the supported range."""
    from megatron.core import package_info

    release = f"{package_info.MAJOR}.{package_info.MINOR}"
    if release not in SUPPORTED:
        raise RuntimeError(
            f"megatron-core {package_info.__version__} is outside the supported releases "
            f"{SUPPORTED[0]} to {SUPPORTED[-1]}: install one of these, or remove hotspa_plugin from the script"
        )
    return release


def _checked(hook: Hook, release: str) -> Callable:
    where = f"megatron {release}, supported are {SUPPORTED[0]} to {SUPPORTED[-1]}"
    try:
        original = getattr(importlib.import_module(hook.module), hook.name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{hook.symbol} is missing ({where}), so hot switching cannot hook it: {error}") from error
    if is_hooked(original):
        raise RuntimeError(f"{hook.symbol} is hooked already: install the hooks of hotspa_plugin once")
    known = hook.signatures.get(release)
    found = tuple(inspect.signature(original).parameters)
    if known is None or tuple(known) != found:
        expected = "no recorded signature" if known is None else f"({', '.join(known)})"
        raise RuntimeError(
            f"{hook.symbol}({', '.join(found)}) is not what this version of hotspa_plugin was written for "
            f"({where}; expected {expected}): update hotspa_plugin, or use a supported release"
        )
    return original
