"""Hot switching made wrong on purpose, in the ways that a loss hardly shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hotspa_plugin.cpu.patches import PatchSet
from hotspa_plugin.layout import GradientClass


def _all_partial(patches: PatchSet) -> None:
    """Replicated norms are added on one tensor-parallel rank only."""
    _class_of(patches, lambda name, stock: GradientClass.PARTIAL)


def _all_identical(patches: PatchSet) -> None:
    """Norms that hold partial sums are read on one tensor-parallel rank only and added on all."""
    _class_of(patches, lambda name, stock: GradientClass.IDENTICAL)


def _class_of(patches: PatchSet, choose) -> None:
    from hotspa_plugin.integrations.megatron import layout_reader

    stock = layout_reader.gradient_class
    patches.replace(layout_reader, "gradient_class", lambda name, *rest: choose(name, stock(name, *rest)))


def _count_everywhere(patches: PatchSet) -> None:
    """Every data-parallel rank gives the global token count, which Megatron sums."""
    from hotspa_plugin.integrations.megatron import schedule

    def finish(self, num_target_tokens, options):
        import torch

        with self.home.state.active():
            count = torch.tensor(num_target_tokens, dtype=torch.int)
            self.home.config.finalize_model_grads_func(list(self.home.chunks), count)

    patches.replace(schedule.HotSwitchSchedule, "_finish_gradients", finish)


def _stale_parameters(patches: PatchSet) -> None:
    """Parameters are not gathered before they are read (shows with overlapped gathering only)."""
    from hotspa_plugin.integrations.megatron import overlap

    patches.replace(overlap, "gather_parameters", lambda chunks: None)


FAULTS = {
    "all partial": _all_partial,
    "all identical": _all_identical,
    "count everywhere": _count_everywhere,
    "stale parameters": _stale_parameters,
}


@contextlib.contextmanager
def active(name: str | None) -> Iterator[None]:
    patches = PatchSet()
    if name is not None:
        FAULTS[name](patches)
    try:
        yield
    finally:
        patches.restore()
