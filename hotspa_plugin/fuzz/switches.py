"""Switches and flushes of all ranks of a case in one process, against tensors laid out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from hotspa_plugin.fuzz.case import FuzzCase, check_at_start
from hotspa_plugin.layout import GPTSizes, GradientClass, Shard, ShardLayout, gpt_layout
from hotspa_plugin.resharding import build_flush_plan, build_switch_plan
from hotspa_plugin.resharding.executor import ReshardExecutor, ReshardStats, StagingBuffer
from hotspa_plugin.resharding.transports import LoopbackWorld
from hotspa_plugin.runtime.global_view import load_global, shard_view
from hotspa_plugin.runtime.slab import Slab
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool, padded_vocab_size

NUM_ROUNDS = 2  # slabs and staging memory are used again
Tensors = dict[str, torch.Tensor]


class WrongNumbers(Exception):
    """A tensor is not what it must be; the message names the first one."""


class Refused(Exception):
    """The case was refused before anything moved; the message is the user's."""


def run_switches(case: FuzzCase) -> None:
    """Brings parameters to every strategy of the pool and gradients home, twice. Raises Refused or WrongNumbers."""
    try:
        world = _World(case)
    except ValueError as error:
        raise Refused(str(error)) from error
    for round_ in range(NUM_ROUNDS):
        world.change_parameters(case.seed + round_)
        for label in world.others:
            world.switch(label)
            world.flush(label, seed=case.seed + 100 * round_)
        world.check_gradients()


class _World:
    """All ranks: home's tensors, slabs for the other strategies', and what the gradients must add up to."""

    def __init__(self, case: FuzzCase) -> None:
        pool, _ = check_at_start(case)
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
        self._ranks = range(case.num_ranks)
        self._budget_bytes = case.switch_memory_bytes
        layouts = {str(s): _layout(case, pool, s) for s in pool.strategies}
        self._home = layouts.pop(str(pool.home))
        self._trainable = [spec.trainable for spec in self._home.tensors]
        self._homes = [_local_tensors(self._home, rank, self._dtype) for rank in self._ranks]
        self._home_gradients = [self._gradients_of(self._home, rank) for rank in self._ranks]
        self._slabs = [(Slab(torch.device("cpu")), Slab(torch.device("cpu"))) for _ in self._ranks]
        self._sums = {s.name: torch.zeros(s.shape) for s in self._home.tensors if s.trainable}
        self._values: Tensors = {}
        nodes = None if case.ranks_per_node is None else np.arange(case.num_ranks) // case.ranks_per_node
        staging = [StagingBuffer() for _ in self._ranks]
        mail = LoopbackWorld(case.num_ranks)
        self.others = layouts
        self._runs = {}
        for label, layout in layouts.items():
            switch = build_switch_plan(self._home, layout, policy=case.policy, node_of_rank=nodes)
            flush = build_flush_plan(layout, self._home, switch)
            parameters, gradients, sizes = [], [], []
            for rank in self._ranks:
                views, num_bytes = self._slabs[rank][0].reserve(_local_tensors(layout, rank, self._dtype))
                grads, grad_bytes = self._slabs[rank][1].reserve(self._gradients_of(layout, rank))
                parameters.append(views)
                gradients.append(grads)
                sizes.append((num_bytes, grad_bytes))
            executors = [
                [
                    ReshardExecutor(
                        plan,
                        rank,
                        mail.transport(rank),
                        sources[rank],
                        destinations[rank],
                        case.switch_memory_bytes,
                        staging=staging[rank],
                    )
                    for rank in self._ranks
                ]
                for plan, sources, destinations in (
                    (switch, self._homes, parameters),
                    (flush, gradients, self._home_gradients),
                )
            ]
            self._runs[label] = (mail, executors, parameters, gradients, sizes)

    def _gradients_of(self, layout: ShardLayout, rank: int) -> Tensors:
        frozen = {s.parameter for s in layout.shards(rank) if not self._trainable[s.tensor]}
        local = _local_tensors(layout, rank, torch.float32)
        return {name: tensor for name, tensor in local.items() if name not in frozen}

    def change_parameters(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._values = {s.name: torch.randn(s.shape, generator=generator).to(self._dtype) for s in self._home.tensors}
        for rank in self._ranks:
            load_global(self._home, rank, self._values, self._homes[rank])

    def switch(self, label: str) -> None:
        """Home to ``label``: every element bit for bit, with the slab poisoned before."""
        mail, (executors, _), parameters, _, sizes = self._runs[label]
        for (slab, gradient_slab), (num_bytes, gradient_bytes) in zip(self._slabs, sizes, strict=True):
            slab.size_for(num_bytes)
            slab.fill(0xFF)
            gradient_slab.size_for(gradient_bytes)
            gradient_slab.fill(0)
        _check_memory(mail.run(executors), self._budget_bytes)
        layout = self.others[label]
        for rank in self._ranks:
            for shard in layout.shards(rank):
                name = layout.tensors[shard.tensor].name
                found = shard_view(parameters[rank][shard.parameter], shard)
                if not torch.equal(found, _part(self._values[name], shard)):
                    raise WrongNumbers(f"after the switch to {label}, rank {rank} holds a wrong {name} {shard.region}")

    def flush(self, label: str, seed: int) -> None:
        """Random integers, whose sums are exact in any order, as gradients of ``label``; brings them home."""
        mail, (_, executors), _, gradients, _ = self._runs[label]
        layout, shared = self.others[label], {}
        generator = torch.Generator().manual_seed(seed)
        for rank in self._ranks:
            for shard in layout.shards(rank):
                name = layout.tensors[shard.tensor].name
                if name not in self._sums:
                    continue
                values = torch.randint(-50, 50, shard.region.shape, generator=generator).float()
                first = True
                if shard.gradient_class is GradientClass.IDENTICAL:
                    key = _copy_of(layout, rank, shard)
                    first, values = key not in shared, shared.setdefault(key, values)
                shard_view(gradients[rank][shard.parameter], shard).copy_(values)
                if first:
                    _part(self._sums[name], shard).add_(values)
        _check_memory(mail.run(executors), self._budget_bytes)

    def check_gradients(self) -> None:
        """Home's accumulators add up to all that was flushed, and its identical copies are identical."""
        found, copies = {name: torch.zeros_like(total) for name, total in self._sums.items()}, {}
        for rank in self._ranks:
            for shard in self._home.shards(rank):
                name = self._home.tensors[shard.tensor].name
                if name not in found:
                    continue
                value = shard_view(self._home_gradients[rank][shard.parameter], shard)
                if shard.gradient_class is GradientClass.IDENTICAL:
                    key = _copy_of(self._home, rank, shard)
                    if (first := copies.setdefault(key, value)) is not value:
                        if not torch.equal(first, value):
                            raise WrongNumbers(f"copies of the gradient of {name} differ at home, rank {rank}")
                        continue
                _part(found[name], shard).add_(value)
        for name, total in self._sums.items():
            if not torch.equal(found[name], total):
                raise WrongNumbers(f"the gradient of {name} does not add up at home")


def _layout(case: FuzzCase, pool: StrategyPool, strategy: ParallelStrategy) -> ShardLayout:
    model = case.model
    learned = model["positions"] == "learned"
    sizes = GPTSizes(
        num_layers=model["num_layers"],
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["ffn_hidden_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_query_groups"],
        kv_channels=model["head_dim"],
        vocab_size=padded_vocab_size(model["vocab_size"], model["make_vocab_size_divisible_by"], pool.strategies),
        gated_mlp=model["activation"] == "swiglu",
        tied_embeddings=model["tied_embeddings"],
        num_learned_positions=model.get("max_positions", pool.bounds_tokens[-1]) if learned else 0,
        biases=model["linear_bias"],
        qk_norm=model["qk_layernorm"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[case.dtype],
    )
    layout = gpt_layout(
        sizes, tp=strategy.tp, pp=strategy.pp, dp=strategy.dp, sequence_parallel=strategy.sp, label=str(strategy)
    )
    return _freeze(layout, case.frozen)


def _freeze(layout: ShardLayout, parts: tuple[str, ...]) -> ShardLayout:
    def trainable(name: str) -> bool:
        return not any(part in name for part in parts)

    tensors = tuple(dataclasses.replace(spec, trainable=trainable(spec.name)) for spec in layout.tensors)
    return dataclasses.replace(layout, tensors=tensors)


def _local_tensors(layout: ShardLayout, rank: int, dtype: torch.dtype) -> Tensors:
    """Zeros for every local parameter, as a line of elements that reaches as far as its shards do."""
    lengths: dict[str, int] = {}
    for shard in layout.shards(rank):
        reach = 1 + shard.storage_offset
        reach += sum((n - 1) * s for n, s in zip(shard.region.shape, shard.strides, strict=True))
        lengths[shard.parameter] = max(lengths.get(shard.parameter, 0), reach)
    return {name: torch.zeros(length, dtype=dtype) for name, length in lengths.items()}


def _copy_of(layout: ShardLayout, rank: int, shard: Shard) -> tuple:
    """Equal for the tensor-parallel copies of one region in one replica."""
    return (shard.tensor, shard.region, int(layout.dp_rank[rank]), shard.stage_copy)


def _part(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    return whole[tuple(slice(low, high) for low, high in zip(shard.region.low, shard.region.high, strict=True))]


def _check_memory(stats: list[ReshardStats], budget_bytes: int | None) -> None:
    for rank, one in enumerate(stats):
        if budget_bytes is not None and one.peak_extra_bytes > budget_bytes:
            raise WrongNumbers(f"rank {rank} took {one.peak_extra_bytes} bytes beside the tensors, over {budget_bytes}")
