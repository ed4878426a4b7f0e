"""What the hooks of one process share, from argument checking to the last step."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config

from hotspa_plugin.data.micro_batch import PaddedMicroBatch
from hotspa_plugin.integrations.megatron import parallel_state
from hotspa_plugin.integrations.megatron.megatron_training.packed import packed_forward_step
from hotspa_plugin.integrations.megatron.megatron_training.step_log import StepLog, StepRecords
from hotspa_plugin.integrations.megatron.megatron_training.strategy_arguments import StrategyArguments
from hotspa_plugin.integrations.megatron.runner import MegatronRunner, to_device
from hotspa_plugin.integrations.megatron.schedule import HotSwitchSchedule
from hotspa_plugin.integrations.megatron.session import ParallelStates, SwitchOptions, build_bucket_loop
from hotspa_plugin.integrations.megatron.strategy_modules import StrategyModules
from hotspa_plugin.process_groups.registry import process_registry
from hotspa_plugin.runtime.bucket_loop import MicroBatch
from hotspa_plugin.runtime.mover import OVERLAPS
from hotspa_plugin.search import AheadAssigner
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool
from hotspa_plugin.topology import DEFAULT_ORDER

ModelFactory = Callable[[ParallelStrategy], list[torch.nn.Module]]


@dataclasses.dataclass(kw_only=True)
class HotRun:
    """The pool and its per-strategy arguments; then, as Megatron starts, group sets, modules and the schedule."""

    pool: StrategyPool
    arguments: Sequence[StrategyArguments]
    home_values: Mapping[str, Any]  # all arguments as validated for home
    get_args: Callable[[], argparse.Namespace]
    micro_batch_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    assigner: AheadAssigner | None = None  # None: the pool's bounds
    states: ParallelStates | None = None
    schedule: HotSwitchSchedule | None = None
    log: StepLog = dataclasses.field(default_factory=StepLog)
    records: StepRecords | None = None

    def create_groups(self, initialize: Callable[..., None], options: dict[str, Any]) -> None:
        """Lets Megatron make home's groups with its own ``options``, then makes the other strategies'."""
        registry = process_registry()
        registry.reopen()
        with parallel_state.groups_from(registry):
            initialize(**options)
        home = self.pool.home

        def create(strategy: ParallelStrategy, registry: Any) -> parallel_state.ParallelState:
            if strategy == home:
                return parallel_state.adopt(strategy)
            # Megatron filled these in for home.
            own = {name: value for name, value in options.items() if name != "expert_tensor_parallel_size"}
            return parallel_state.create(strategy, registry, initialize=initialize, options=own)

        self.states = ParallelStates(
            self.pool,
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
            order=options.get("order", DEFAULT_ORDER),
            create=create,
            overlap=OVERLAPS[self.get_args().hotspa_overlap_switch],
        )

    def build(self, home_chunks: list[torch.nn.Module], home_bare: list[Any], build_model: ModelFactory) -> None:
        """Builds the other strategies' modules beside home's, and the schedule over all of them."""
        args = self.get_args()
        self.records = StepRecords(args, self.pool)
        index = self.pool.home_index
        _prepare_config(home_chunks[0])
        home = self.states.modules(index, home_chunks, home_bare, self.arguments[index].active)
        _check_accumulators(home)

        def build(strategy: ParallelStrategy, initialize: bool) -> list[torch.nn.Module]:
            chunks = build_model(strategy)
            _prepare_config(chunks[0])
            return chunks

        loop = build_bucket_loop(
            self.states,
            home,
            build,
            seed=args.seed,
            packing=args.hotspa_packing,
            switch=SwitchOptions(
                policy=args.hotspa_switch_policy,
                memory_budget_bytes=None
                if args.hotspa_switch_memory_mb is None
                else args.hotspa_switch_memory_mb << 20,
                overlap=OVERLAPS[args.hotspa_overlap_switch],
                order=args.hotspa_bucket_order,
            ),
            recorder=self.records.recorder,
            device=torch.device(torch.cuda.current_device()),
            surroundings=[arguments.active for arguments in self.arguments],
            make_runner=self._make_runner,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        loop.assigner = self.assigner
        adapt = packed_forward_step if args.hotspa_packing == "packed" else None
        self.schedule = HotSwitchSchedule(loop, home, adapt=adapt)
        self.schedule.is_checked = args.hotspa_check_every == 1

    def finish_step(self, iteration: int, grad_norm: float | None, learning_rate: float | None) -> None:
        """Notes what the schedule did in the step that ends as ``iteration``; collective."""
        args, result = self.get_args(), self.schedule.last_result
        self.log.add(result)
        self.records.finish_step(iteration - 1, result, grad_norm, learning_rate)
        self.schedule.is_checked = args.hotspa_check_every > 0 and (iteration + 1) % args.hotspa_check_every == 0
        if args.hotspa_check_every and iteration % args.hotspa_check_every == 0:
            self.schedule.check_copies(f"step {iteration - 1}, after the optimizer")

    def _make_runner(self, modules: StrategyModules) -> MegatronRunner:
        args = self.get_args()

        def announce(micro_batch: MicroBatch) -> None:
            # Scripts size the buffers that tensor-parallel peers receive into by these.
            args.micro_batch_size, args.seq_length = micro_batch.tokens.shape

        present = as_megatron_batch if args.hotspa_packing == "padded" else to_device
        return MegatronRunner(modules, seed=args.seed, present=present, before_forward=announce)


def as_megatron_batch(micro_batch: PaddedMicroBatch) -> dict[str, torch.Tensor]:
    """A padded micro-batch as the dictionary that Megatron's data loaders yield."""
    moved = to_device(micro_batch)
    return {name: getattr(moved, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}


def _prepare_config(chunk: torch.nn.Module) -> None:
    config = get_model_config(chunk)
    # Micro-batches differ in length, so pipeline stages exchange shapes before tensors. Megatron's own check of this
    # setting is about expert parallel dispatchers, which dense models do not have.
    config.variable_seq_lengths = True
    # Ranks without work in a bucket would leave the others waiting in a timer's barrier.
    config.barrier_with_L1_time = False


def _check_accumulators(home: StrategyModules) -> None:
    for name, parameter in home.parameters.items():
        if parameter.requires_grad and parameter.main_grad.dtype != torch.float32:
            raise ValueError(
                f"gradients of {name} are accumulated in {parameter.main_grad.dtype}, but hot switching adds "
                "gradients of several strategies in fp32: set --accumulate-allreduce-grads-in-fp32"
            )


_current: HotRun | None = None


def current() -> HotRun | None:
    """The run of this process; None where ``--hotspa-pool`` was not given."""
    return _current


def begin(run: HotRun | None) -> None:
    """Makes ``run`` the run of this process."""
    global _current
    _current = run
