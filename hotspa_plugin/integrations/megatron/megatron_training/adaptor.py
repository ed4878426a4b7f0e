"""The hooks by which ``megatron.training`` drives hot switching; each passes straight through without a pool."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from hotspa_plugin.integrations.megatron.megatron_training import auto_pool, data, documents, flags, hot_run
from hotspa_plugin.integrations.megatron.megatron_training.hot_run import HotRun
from hotspa_plugin.integrations.megatron.megatron_training.model_factory import model_factory
from hotspa_plugin.integrations.megatron.megatron_training.packed import loss_function_of
from hotspa_plugin.integrations.megatron.megatron_training.refusals import (
    refuse_unsupported,
    refuse_without_pool,
    user_errors,
)
from hotspa_plugin.integrations.megatron.megatron_training.step_log import write_scalars
from hotspa_plugin.integrations.megatron.megatron_training.strategy_arguments import StrategyArguments, changes_for
from hotspa_plugin.search import AheadAssigner
from hotspa_plugin.strategy import StrategyPool


def get_args() -> argparse.Namespace:
    from megatron.training import get_args as megatron_get_args

    return megatron_get_args()


def wrap_add_megatron_arguments(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return flags.repair_help(flags.add_flags(original(parser)))

    return add_megatron_arguments


def wrap_validate_args(original: Callable) -> Callable:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **options: Any) -> argparse.Namespace:
        hot_run.begin(None)
        if not getattr(args, "hotspa_pool", None):
            with user_errors(args.rank):
                refuse_without_pool(args)
            return original(args, *rest, **options)
        with user_errors(args.rank, "--hotspa-pool"):
            micro_batch_tokens, assigner = auto_pool.choose(args)
            pool = flags.read_pool(args)
            refuse_unsupported(args, pool)
        for name, value in flags.strategy_flags(pool.home, args).items():
            if args.hotspa_home is not None or name == "sequence_parallel":
                setattr(args, name, value)
        _switch_on_what_is_needed(args)
        parsed = copy.deepcopy(args)
        result = original(args, *rest, **options)
        with user_errors(args.rank, "--hotspa-pool"):
            pool = _check_pool(pool, args)

        def validate(other: argparse.Namespace) -> None:
            original(other, *rest, **options)

        changes = [
            {} if strategy == pool.home else changes_for(strategy, parsed=parsed, home=args, validate=validate)
            for strategy in pool.strategies
        ]
        arguments = [StrategyArguments(change, get_args) for change in changes]
        hot_run.begin(
            HotRun(
                pool=pool, arguments=arguments, home_values=dict(vars(args)), get_args=get_args,
                micro_batch_tokens=micro_batch_tokens, assigner=assigner and AheadAssigner(assigner),
            )
        )  # fmt: skip
        return result

    return validate_args


def _switch_on_what_is_needed(args: argparse.Namespace) -> None:
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        _notice(
            args, "--calculate-per-token-loss is switched on: the loss is divided once, by the tokens of all buckets"
        )
    if getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False):
        if args.hotspa_packing != "packed":
            args.hotspa_packing = "packed"
            _notice(args, "--hotspa-packing packed is switched on: the script trains on packs of sequences")
    if getattr(args, "sft", False) and args.hotspa_sample_unit != "sample":
        args.hotspa_sample_unit = "sample"
        _notice(args, "--hotspa-sample-unit sample is switched on: conversations come from the script's own data set")
    if args.hotspa_timeout_s is not None:
        args.distributed_timeout_minutes = args.hotspa_timeout_s / 60
    args.barrier_with_L1_time = False
    args.create_attention_mask_in_dataloader = False


def _notice(args: argparse.Namespace, text: str) -> None:
    if args.rank == 0:
        print(f" > hotspa: {text}", flush=True)


def _check_pool(pool: StrategyPool, args: argparse.Namespace) -> StrategyPool:
    # Only the tokenizer, built later, tells the padded vocabulary: here one that fits every tp.
    vocab_size = int(np.lcm.reduce([strategy.tp for strategy in pool.strategies]))
    return pool.check(world_size=args.world_size, model=flags.model_shape(args, vocab_size), interleaved=True)


def wrap_initialize_model_parallel(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **options: Any) -> None:
        run = hot_run.current()
        if run is None:
            return original(*args, **options)
        with user_errors(torch.distributed.get_rank()):
            flags.check_vocabulary(get_args(), run.pool)
        run.create_groups(original, dict(inspect.signature(original).bind(*args, **options).arguments))
        return None

    return initialize_model_parallel


def wrap_setup_model_and_optimizer(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **options: Any) -> tuple:
        run = hot_run.current()
        if run is None:
            return original(*args, **options)
        with _other_home_refused(run), user_errors(torch.distributed.get_rank()):
            result = original(*args, **options)
        from megatron.core.utils import unwrap_model

        given = signature.bind(*args, **options).arguments
        model = result[0]
        with _random_state_kept(), user_errors(torch.distributed.get_rank()):
            run.build(model, unwrap_model(model), model_factory(run, given, get_args))
        return result

    return setup_model_and_optimizer


@contextlib.contextmanager
def _other_home_refused(run: HotRun) -> Iterator[None]:
    """Says what to do where Megatron cannot load an optimizer that was saved under another strategy."""
    try:
        yield
    except RuntimeError as error:
        if "mismatch after resume" not in str(error):
            raise
        with user_errors(torch.distributed.get_rank()):
            raise ValueError(
                f"the checkpoint in --load {get_args().load} holds an optimizer of another home than {run.pool.home} "
                f"({str(error).partition(':')[0]}): choose its strategy with --hotspa-home, or save it with "
                "--dist-ckpt-optim-fully-reshardable"
            ) from error


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.cuda.set_rng_state(states[3])
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def wrap_build_iterators(original: Callable) -> Callable:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Callable) -> tuple:
        run = hot_run.current()
        if run is None:
            return original(provider)
        if get_args().hotspa_sample_unit == "document":
            provider = functools.partial(_document_provider, run)
            provider.is_distributed = True
        with data.every_rank_reads(), user_errors(torch.distributed.get_rank(), "--hotspa-overlong"):
            return original(provider)

    return build_train_valid_test_data_iterators


def _document_provider(run: HotRun, num_samples: list[int], vp_stage: int | None = None) -> tuple:
    return documents.document_sets(get_args(), num_samples, bound_tokens=run.pool.bounds_tokens[-1])


def wrap_build_loader(original: Callable) -> Callable:
    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        run = hot_run.current()
        if run is None or dataset is None:
            return original(dataset, consumed_samples)
        from megatron.core.datasets.utils import Split
        from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

        args = get_args()
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        batch_size = get_current_running_global_batch_size
        if split in (Split.valid, Split.test):
            batch_size = functools.partial(getattr, args, "eval_global_batch_size", args.global_batch_size)
        return data.BatchLoader(
            dataset,
            consumed_samples,
            batch_size=batch_size,
            step=lambda: args.curr_iteration,
            bound_tokens=run.pool.bounds_tokens[-1],
            overlong=args.hotspa_overlong,
            prepare=run.assigner.prepare if run.assigner and split not in (Split.valid, Split.test) else None,
        )

    return build_pretraining_data_loader


def wrap_get_forward_backward_func(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **options: Any) -> Callable:
        run = hot_run.current()
        return original(*args, **options) if run is None else run.schedule

    return get_forward_backward_func


def wrap_training_log(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **options: Any) -> Any:
        run = hot_run.current()
        result = original(*args, **options)
        if run is None:
            return result
        from megatron.training import get_tensorboard_writer, get_wandb_writer, print_rank_last

        given = signature.bind(*args, **options)
        given.apply_defaults()
        told = given.arguments
        iteration, settings = told["iteration"], get_args()
        run.finish_step(iteration, told["grad_norm"], told["learning_rate"])
        if iteration % settings.log_interval == 0 or told["is_first_iteration"]:
            print_rank_last(run.log.line())
            write_scalars(run.log, iteration, (get_tensorboard_writer(), get_wandb_writer()))
            run.log.restart()
        return result

    return training_log


def wrap_train_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def train_step(*args: Any, **options: Any) -> tuple:
        if (run := hot_run.current()) is not None:
            run.records.start_step()
        return original(*args, **options)

    return train_step


def wrap_train(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*args: Any, **options: Any) -> Any:
        run = hot_run.current()
        if run is not None and get_args().hotspa_packing == "packed":
            with user_errors(torch.distributed.get_rank()):
                loss_function_of(signature.bind(*args, **options).arguments["forward_step_func"])
        try:
            result = original(*args, **options)
        except SystemExit:  # how Megatron ends a run for a signal or a time limit
            if run is not None:
                run.records.close()
            raise
        if run is not None:
            run.records.close()
        return result

    return train
