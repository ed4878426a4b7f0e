"""Home's process groups as DeepSpeed asks for them."""

from __future__ import annotations

import torch.distributed as dist

from hotspa_plugin.process_groups.registry import ProcessGroupRegistry
from hotspa_plugin.topology import RankGrid


class HomeGroups:
    """What DeepSpeed calls an ``mpu``: home's groups, sizes and this rank's place in them."""

    def __init__(self, grid: RankGrid, rank: int, registry: ProcessGroupRegistry) -> None:
        self._place = grid.coordinate(rank)
        self._strategy = grid.strategy
        self._groups = {axes: registry.get(grid.group_of(axes, rank)) for axes in ("dp", "tp", "pp", "tp-pp")}

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups["dp"]

    def get_data_parallel_world_size(self) -> int:
        return self._strategy.dp

    def get_data_parallel_rank(self) -> int:
        return self._place.dp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups["tp-pp"]

    def get_model_parallel_world_size(self) -> int:
        return self._strategy.tp * self._strategy.pp

    def get_model_parallel_rank(self) -> int:
        return dist.get_group_rank(self._groups["tp-pp"], dist.get_rank())

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups["tp"]

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._strategy.tp

    def get_tensor_model_parallel_rank(self) -> int:
        return self._place.tp

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups["pp"]

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._strategy.pp

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._place.pp
