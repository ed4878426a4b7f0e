"""Everything that hot switching needs on a rank, made once at start."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from megatron.core.transformer.module import Float16Module, MegatronModule

from hotspa_plugin.integrations.megatron import parallel_state, random_state
from hotspa_plugin.integrations.megatron.runner import MegatronRunner
from hotspa_plugin.integrations.megatron.strategy_modules import StrategyModules, Surroundings, attach_gradient
from hotspa_plugin.process_groups import plan_groups
from hotspa_plugin.process_groups.registry import ProcessGroupRegistry, process_registry
from hotspa_plugin.resharding.plan_cache import PlanCache
from hotspa_plugin.resharding.transports import TorchDistributedTransport
from hotspa_plugin.runtime.agreement import check_agreement
from hotspa_plugin.runtime.bucket_loop import BucketLoop, bucket_specs
from hotspa_plugin.runtime.hot_switcher import HomeTensors, HotSwitcher, StrategyTensors
from hotspa_plugin.runtime.mover import Overlap
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool
from hotspa_plugin.topology import DEFAULT_ORDER, RankGrid

ModelBuilder = Callable[[ParallelStrategy, bool], list[torch.nn.Module]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchOptions:
    """How parameters and gradients move between strategies; ``node_of_rank`` None: as the ranks find out."""

    policy: str = "balanced"
    memory_budget_bytes: int | None = None
    node_of_rank: np.ndarray | None = None
    cards_per_node: int = 1
    overlap: Overlap = Overlap()
    order: str = "auto"  # auto, ascending, descending: of the others' buckets
    plan_cache: PlanCache | None = None

    def said(self) -> dict[str, object]:
        """What all ranks must agree on, JSON-able; where plans are kept is each rank's own affair."""
        said = {name: getattr(self, name) for name in ("policy", "memory_budget_bytes", "cards_per_node", "order")}
        said["nodes"] = None if self.node_of_rank is None else self.node_of_rank.tolist()
        return said | {"overlap": dataclasses.asdict(self.overlap)}


class ParallelStates:
    """The group sets of all strategies of a pool, made at start through one registry."""

    def __init__(
        self,
        pool: StrategyPool,
        *,
        rank: int,
        world_size: int,
        order: str = DEFAULT_ORDER,
        create: Callable[[ParallelStrategy, ProcessGroupRegistry], parallel_state.ParallelState] | None = None,
        overlap: Overlap = Overlap(),
    ) -> None:
        """``order`` is Megatron's rank order; ``create`` makes one strategy's groups (default: plainly).

        Where moves ``overlap`` with compute they get a group of their own.
        """
        # Before anything collective is done that depends on it: groups of two pools would wait for each other.
        said = {"entries": str(pool), "home": str(pool.home), "digest": pool.digest(), "rank order": order}
        check_agreement("the pool", said, device=torch.device(torch.cuda.current_device()))
        self.pool = pool
        self.rank, self.world_size = rank, world_size
        self.registry = process_registry()
        self.registry.reopen()
        self.grids = [RankGrid(strategy=strategy, world_size=world_size, order=order) for strategy in pool.strategies]
        create = create or functools.partial(parallel_state.create, options={"order": order})
        self.registry.create_all(plan_groups(self.grids))
        self.states = [create(strategy, self.registry) for strategy in pool.strategies]
        self.switch_group = self.registry.get(range(world_size), purpose="switch") if overlap.any else None
        self.registry.warm_up()
        self.registry.seal()
        random_state.prepare()

    @property
    def home(self) -> parallel_state.ParallelState:
        return self.states[self.pool.home_index]

    def modules(
        self,
        index: int,
        chunks: Sequence[torch.nn.Module],
        bare: Sequence[MegatronModule],
        surroundings: Surroundings = contextlib.nullcontext,
    ) -> StrategyModules:
        """The modules of the pool's strategy ``index``, with its group set."""
        return StrategyModules(
            surroundings=surroundings,
            label=str(self.pool.strategies[index]),
            state=self.states[index],
            coordinate=self.grids[index].coordinate(self.rank),
            chunks=chunks,
            bare_chunks=bare,
            config=bare[0].config,
        )


def build_bucket_loop(
    states: ParallelStates,
    home: StrategyModules,
    build_model: ModelBuilder,
    *,
    seed: int,
    packing: str,
    switch: SwitchOptions = SwitchOptions(),
    micro_batch_tokens: Mapping[str, int] | None = None,
    recorder: RunRecorder | NullRecorder | None = None,
    device: torch.device,
    surroundings: Sequence[Surroundings] | None = None,
    make_runner: Callable[[StrategyModules], MegatronRunner] | None = None,
) -> BucketLoop:
    """Builds the other strategies' modules in the slab, plans all switches, and returns the loop over buckets.

    ``home`` is wrapped for training: its parameters have ``main_grad``. ``build_model(strategy, initialize)``
    builds a rank's model chunks while that strategy's groups are in place. ``surroundings`` (one for each strategy
    of the pool) are entered around everything that one strategy does; ``make_runner`` makes what runs its buckets.
    Collective over the world.
    """
    pool = states.pool
    surroundings = surroundings or [contextlib.nullcontext] * len(pool.strategies)
    make_runner = make_runner or functools.partial(MegatronRunner, seed=seed)
    # All ranks plan alike from alike layouts: what differs here would send a message that nobody awaits.
    check_agreement("how to switch", {**switch.said(), "packing": packing, "seed": seed}, device=device)
    everyone = [
        home if index == pool.home_index else _build_bare(states, index, build_model, surroundings[index])
        for index in range(len(pool.strategies))
    ]
    layouts = [modules.read_layout() for modules in everyone]
    switcher = HotSwitcher(
        rank=states.rank,
        home=HomeTensors(
            layout=layouts[pool.home_index],
            parameters={name: parameter.data for name, parameter in home.parameters.items()},
            gradients={name: p.main_grad for name, p in home.parameters.items() if p.requires_grad},
        ),
        others={
            modules.label: StrategyTensors(
                layout=layout, parameters=modules.parameters, attach_gradient=attach_gradient
            )
            for modules, layout in zip(everyone, layouts, strict=True)
            if modules is not home
        },
        transport=TorchDistributedTransport(states.switch_group),
        node_of_rank=switch.node_of_rank,
        cards_per_node=switch.cards_per_node,
        policy=switch.policy,
        memory_budget_bytes=switch.memory_budget_bytes,
        overlap=switch.overlap,
        order=switch.order,
        plan_cache=switch.plan_cache,
        device=device,
    )
    return BucketLoop(
        buckets=bucket_specs(pool, micro_batch_tokens=micro_batch_tokens),
        runners=[make_runner(modules) for modules in everyone],
        home_index=pool.home_index,
        switcher=switcher,
        packing=packing,
        recorder=recorder,
        device=device,
        # With overlapped reduction Megatron reduces home's gradients during home's last backward pass.
        # Without Megatron's DDP (under DeepSpeed) nothing reduces while home runs.
        adds_after_home=not getattr(getattr(home.chunks[0], "ddp_config", None), "overlap_grad_reduce", False),
    )


def _build_bare(
    states: ParallelStates, index: int, build_model: ModelBuilder, surroundings: Surroundings
) -> StrategyModules:
    with states.states[index].active(), surroundings():
        chunks = build_model(states.pool.strategies[index], False)
    for chunk in chunks:
        chunk.train()
    bare = [chunk.module if isinstance(chunk, Float16Module) else chunk for chunk in chunks]
    return states.modules(index, chunks, bare, surroundings)
