"""Building another strategy's modules the way that the script had home's built."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from hotspa_plugin.integrations.megatron.megatron_training.hot_run import HotRun, ModelFactory
from hotspa_plugin.strategy import ParallelStrategy


def model_factory(run: HotRun, given: dict[str, Any], get_args: Callable[[], argparse.Namespace]) -> ModelFactory:
    """What builds a strategy's model chunks, from what ``setup_model_and_optimizer`` was given.

    That is a model configuration in a container (0.19) or a model provider function. The strategy's arguments and
    groups must be in place when it is called.
    """
    container = given.get("cfg_container")
    if getattr(container, "model", None) is not None:
        return functools.partial(_build_from_config, run, get_args, container.model)
    from megatron.training.training import get_model

    def build(strategy: ParallelStrategy) -> list:
        with _quiet(), run.arguments[run.pool.index_of(strategy)].active(perform_initialization=False):
            return get_model(given["model_provider_func"], given["model_type"], wrap_with_ddp=False)

    return build


def _build_from_config(
    run: HotRun, get_args: Callable[[], argparse.Namespace], home_config: Any, strategy: ParallelStrategy
) -> list:
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    home_args = copy.copy(args)
    for name in run.arguments[run.pool.index_of(strategy)].changes:
        setattr(home_args, name, run.home_values.get(name))
    with _quiet():
        kind = type(home_config.transformer)
        config = copy.deepcopy(home_config)
        config.transformer = config_for(
            home_config.transformer,
            core_transformer_config_from_args(home_args, kind),
            core_transformer_config_from_args(args, kind),
        )
        config.transformer.perform_initialization = False
        builder = config.get_builder_cls()(config)
        return builder.build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False
        )


def config_for(home: Any, home_default: Any, strategy_default: Any) -> Any:
    """A copy of ``home``'s configuration with whatever distinguishes the two defaults, both made from arguments.

    So changes that the script made to its configuration carry over to every strategy.
    """
    config = copy.deepcopy(home)
    for field in dataclasses.fields(strategy_default):
        before, after = getattr(home_default, field.name), getattr(strategy_default, field.name)
        if not callable(after) and before != after:
            setattr(config, field.name, after)
    return config


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron prints the size of every model it builds; the other strategies' are home's over again."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
