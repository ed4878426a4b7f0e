"""Several tensor/pipeline/data-parallel group sets behind Megatron's one ``parallel_state``.

Megatron keeps its groups in module globals. Each strategy's set is made once by Megatron's own
``initialize_model_parallel``, remembered, and put in place around that strategy's work.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.core import parallel_state

from hotspa_plugin.process_groups.registry import ProcessGroupRegistry
from hotspa_plugin.strategy import ParallelStrategy


def _global_names() -> list[str]:
    return [name for name in vars(parallel_state) if name.startswith("_") and name[1:2].isupper()]


def _snapshot() -> dict[str, Any]:
    # Containers are copied, so that Megatron appending to one strategy's cannot reach another's.
    return {
        name: copy.copy(value) if isinstance(value := getattr(parallel_state, name), (dict, list)) else value
        for name in _global_names()
    }


def _assign(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(parallel_state, name, value)


if parallel_state.model_parallel_is_initialized():
    raise RuntimeError(
        "hotspa_plugin.integrations.megatron must be imported before Megatron's model parallel groups "
        "are made: import hotspa_plugin.megatron_adaptor right after torch"
    )
_PRISTINE = _snapshot()


class ParallelState:
    """One strategy's set of Megatron globals."""

    def __init__(self, strategy: ParallelStrategy, values: dict[str, Any]) -> None:
        self.strategy = strategy
        self._values = values

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts this set in place, and what was there before back at the end."""
        before = {name: getattr(parallel_state, name) for name in self._values}
        _assign(self._values)
        try:
            yield
        finally:
            self._values = {name: getattr(parallel_state, name) for name in self._values}
            _assign(before)


def create(
    strategy: ParallelStrategy,
    registry: ProcessGroupRegistry,
    *,
    initialize: Callable[..., None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ParallelState:
    """Makes ``strategy``'s groups (collective over the world) without touching the ones in place.

    Groups with the same ranks are shared between strategies through ``registry``. ``initialize`` is Megatron's
    ``initialize_model_parallel`` where that has been wrapped; ``options`` are further arguments for it.
    """
    before = {name: getattr(parallel_state, name) for name in _global_names()}
    _assign({name: copy.copy(value) for name, value in _PRISTINE.items()})
    sizes = {
        "tensor_model_parallel_size": strategy.tp,
        "pipeline_model_parallel_size": strategy.pp,
        "virtual_pipeline_model_parallel_size": strategy.vpp if strategy.vpp > 1 else None,
        "context_parallel_size": strategy.cp,
        "create_gloo_process_groups": False,
    }
    try:
        with groups_from(registry):
            (initialize or parallel_state.initialize_model_parallel)(**{**(options or {}), **sizes})
        values = _snapshot()
    finally:
        _assign(before)
    # One scratch buffer serves all strategies: never two of them run at once.
    if (buffer := before.get("_GLOBAL_MEMORY_BUFFER")) is not None:
        values["_GLOBAL_MEMORY_BUFFER"] = buffer
    return ParallelState(strategy, values)


def adopt(strategy: ParallelStrategy) -> ParallelState:
    """The set that is in place now, which somebody else made for ``strategy``."""
    return ParallelState(strategy, _snapshot())


@contextlib.contextmanager
def groups_from(registry: ProcessGroupRegistry) -> Iterator[None]:
    """Serves Megatron's ``create_group`` from the registry while a strategy's groups are made.

    A group that the registry does not have yet is made by Megatron with all its options.
    """
    original = parallel_state.create_group

    def create_group(ranks=None, timeout=None, backend=None, **options):
        ranks = sorted(ranks)
        make = functools.partial(original, ranks=ranks, timeout=timeout, backend=backend, **options)
        return registry.get(ranks, backend=backend, create=make)

    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = original


def reset() -> None:
    """Forgets the set in place, as if no model parallel groups had been made yet; destroys no group."""
    _assign({name: copy.copy(value) for name, value in _PRISTINE.items()})
