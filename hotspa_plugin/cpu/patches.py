"""Replacing attributes so that they can all be put back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class PatchSet:
    """Attributes replaced on modules and classes, restored in reverse order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Sets ``owner.name`` and returns what it was; AttributeError where there is nothing to replace."""
        original = getattr(owner, name)
        # An inherited attribute is put back by deleting ours, not by pinning a copy on the subclass.
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)
        return original

    def restore(self) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
