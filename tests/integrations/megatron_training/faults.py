"""Hot switching made wrong on purpose, in the ways that a loss hardly shows; each takes a ``pytest.MonkeyPatch``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.integrations.megatron.faults import FAULTS as CORE_FAULTS


def parameters_not_gathered(patch: pytest.MonkeyPatch) -> None:
    """Other strategies read home's parameters before home has gathered them (with overlapped gathering)."""
    from hotspa_plugin.integrations.megatron import overlap

    patch.setattr(overlap, "gather_parameters", lambda chunks: None)


FAULTS = {**CORE_FAULTS, "parameters_not_gathered": parameters_not_gathered}


@contextlib.contextmanager
def active(name: str | None) -> Iterator[None]:
    """The named fault, or none."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            FAULTS[name](patch)
        yield
