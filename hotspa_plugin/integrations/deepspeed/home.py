"""Home's weights and gradients on this rank: what the strategies read and add to, and what DeepSpeed updates."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from hotspa_plugin.integrations.deepspeed.host import HostModule
from hotspa_plugin.layout import GradientClass, ShardLayout
from hotspa_plugin.process_groups.registry import ProcessGroupRegistry
from hotspa_plugin.topology import RankGrid


class HomeReduction:
    """Which of home's gradients are sums over tensor or pipeline parallel, and which copy counts in a norm.

    After all buckets each data-parallel replica of home must hold its own complete gradient; the sum over replicas
    is DeepSpeed's. What has to be added follows from the layout alone.
    """

    def __init__(self, layout: ShardLayout, grid: RankGrid, rank: int, registry: ProcessGroupRegistry) -> None:
        tp_ranks = grid.group_of("tp", rank)
        pp_ranks = grid.group_of("pp", rank)
        self._tp_group = registry.get(tp_ranks)
        stages = tuple(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))
        self._stage_group = registry.get(stages) if len(stages) > 1 and rank in stages else None
        self.over_tp: list[str] = []
        self.over_stages: list[str] = []
        self.counted: dict[str, bool] = {}
        self.second_copies: set[str] = set()
        elsewhere = {
            axis: {(shard.tensor, shard.region) for r in ranks if r != rank for shard in layout.shards(r)}
            for axis, ranks in (("tp", tp_ranks), ("stages", stages if rank in stages else ()))
        }
        # In the same order on every rank of a group: by tensor.
        for shard in sorted(layout.shards(rank), key=lambda s: (s.tensor, s.region.low)):
            name, key = shard.parameter, (shard.tensor, shard.region)
            if not layout.tensors[shard.tensor].trainable:
                continue
            replicated = key in elsewhere["tp"]
            if replicated and shard.gradient_class is GradientClass.PARTIAL and name not in self.over_tp:
                self.over_tp.append(name)
            if key in elsewhere["stages"] and name not in self.over_stages:
                self.over_stages.append(name)
            if shard.stage_copy:
                self.second_copies.add(name)
            self.counted[name] = not shard.stage_copy and (not replicated or grid.coordinate(rank).tp == 0)

    def run(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Adds what tensor-parallel peers, or the two holders of a tied embedding, hold in parts; in place."""
        _all_reduce([gradients[name] for name in self.over_tp], self._tp_group)
        _all_reduce([gradients[name] for name in self.over_stages], self._stage_group)

    def mark(self, host: HostModule) -> None:
        """Tells DeepSpeed, by the attributes that it reads, which parameters this rank counts in a gradient norm."""
        for name, parameter in host.named_parameters():
            parameter.tensor_model_parallel = self.counted.get(name, False)
            if name in self.second_copies:
                parameter.ds_pipe_replicated = True


def _all_reduce(tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


class HomeWeights:
    """The tensors that home's modules compute with, and home's fp32 gradient accumulators, by local parameter name.

    Where the host's own parameters can be computed with (fp32, not partitioned), they are; else the weights are
    copies in the compute dtype, brought up to date by ``refresh``.
    """

    def __init__(self, host: HostModule, *, dtype: torch.dtype, partitioned: bool, device: torch.device) -> None:
        self._masters = dict(host.named_parameters())
        self._partitioned = partitioned
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in self._masters.items()}
        if dtype is torch.float32 and not partitioned:
            self.parameters = {name: p.data for name, p in self._masters.items()}
        else:
            self.parameters = {name: torch.empty(s, dtype=dtype, device=device) for name, s in shapes.items()}
        trainable = {name: shapes[name] for name, p in self._masters.items() if p.requires_grad}
        self._flat = torch.zeros(sum(map(math.prod, trainable.values())), dtype=torch.float32, device=device)
        pieces = self._flat.split([math.prod(shape) for shape in trainable.values()])
        self.gradients = {
            name: piece.view(shape) for (name, shape), piece in zip(trainable.items(), pieces, strict=True)
        }
        self.refresh()

    def zero_gradients(self) -> None:
        self._flat.zero_()

    def gradients_are_finite(self) -> bool:
        """Whether no gradient of any rank is infinite or not a number; collective over the world."""
        total = self._flat.sum()  # infinities and NaN survive sums
        dist.all_reduce(total)
        return bool(torch.isfinite(total))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the host's parameters to the weights, where the two are not one; collective where partitioned."""
        if self._partitioned:
            import deepspeed

            # One at a time: gathering all would hold a second whole copy.
            for name, master in self._masters.items():
                with deepspeed.zero.GatheredParameters([master]):
                    self.parameters[name].copy_(master.data)
            return
        for name, master in self._masters.items():
            if master.data_ptr() != self.parameters[name].data_ptr() or master.dtype != self.parameters[name].dtype:
                self.parameters[name].copy_(master.data)
