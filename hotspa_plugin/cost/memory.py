"""Memory of a rank: home, the slab of a strategy, and the activations of its micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import math

from hotspa_plugin.cost.profile import Profile
from hotspa_plugin.layout import gpt_layout
from hotspa_plugin.strategy import ParallelStrategy

GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
# Micro-batches of ever new shapes leave gaps between what is live, which the single lengths of a profile do not show.
# Steps of such took up to 4 % more than a limit that was planned for with the profile's error kept free.
ALLOCATOR_GAPS = 0.1
DEFAULT_STAGING_BYTES = 256 * 2**20  # extra memory of one switch


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketMemory:
    """Bytes of the fullest rank while one bucket runs. ``total_bytes`` includes what cannot be used."""

    home_bytes: int
    slab_bytes: int  # parameters and gradients of the strategy; 0 at home
    staging_bytes: int
    activation_bytes: int
    reserved_bytes: int
    error: float = 0.0  # by how much, as a share of a model's own bytes, a prediction may be off

    @property
    def own_bytes(self) -> int:
        """What the model itself takes, without what any process holds."""
        return self.home_bytes + self.slab_bytes + self.staging_bytes + self.activation_bytes

    @property
    def margin_bytes(self) -> int:
        """What is kept free because a profile errs: to be over the limit ends a run, to be under it costs little."""
        return math.ceil(self.error * self.own_bytes)

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.margin_bytes + self.reserved_bytes


class MemoryModel:
    """Predicts a rank's memory from a profile. Per rank maxima are added, which may be a little too much.

    ``limit_bytes`` replaces the device's memory.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        limit_bytes: int | None = None,
        slab_gradients: str = "fp32",
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        self._profile = profile
        self.limit_bytes = profile.memory.device_bytes if limit_bytes is None else limit_bytes
        self.slab_gradient_bytes = GRADIENT_BYTES[slab_gradients]
        self._num_parameters = functools.cache(self._count_parameters)
        # A switch never stages more than the whole model's gradients.
        self.staging_bytes = min(staging_bytes, 4 * self._num_parameters(1, 1))

    def _count_parameters(self, tp: int, pp: int) -> int:
        layout = gpt_layout(self._profile.model.gpt_sizes(), tp=tp, pp=pp, dp=1)
        return max(sum(shard.region.num_elements for shard in holding) for holding in layout.holdings)

    def num_parameters(self, strategy: ParallelStrategy) -> int:
        """Parameters of the fullest rank."""
        return self._num_parameters(strategy.tp, strategy.pp)

    def home_bytes(self, home: ParallelStrategy) -> int:
        """Parameters, gradients and optimizer state of a home (dp resolved)."""
        memory = self._profile.memory
        shares = home.dp if memory.distributed_optimizer else 1
        per_parameter = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes / shares
        return math.ceil(self.num_parameters(home) * per_parameter)

    def slab_bytes(self, strategy: ParallelStrategy) -> int:
        """Parameters and gradients of a strategy that is not home."""
        return self.num_parameters(strategy) * (self._profile.memory.parameter_bytes + self.slab_gradient_bytes)

    def bucket(
        self, strategy: ParallelStrategy, home: ParallelStrategy, *, micro_batch_tokens: int, hot: bool = True
    ) -> BucketMemory:
        """Memory while ``strategy`` runs micro-batches of so many tokens beside ``home`` (which may be itself)."""
        stage = self._profile.stage(strategy)
        away = not _same(strategy, home)
        return BucketMemory(
            home_bytes=self.home_bytes(home),
            slab_bytes=self.slab_bytes(strategy) if away else 0,
            # kept from step to step once a pool has been switched
            staging_bytes=self.staging_bytes if hot else 0,
            activation_bytes=math.ceil(
                stage.activation_fixed_bytes + stage.activation_bytes_per_token * micro_batch_tokens
            ),
            reserved_bytes=self._profile.memory.reserved_bytes,
            error=0.0 if stage.memory_error is None else stage.memory_error + ALLOCATOR_GAPS,
        )

    def capacity_tokens(self, strategy: ParallelStrategy, home: ParallelStrategy, *, hot: bool = True) -> int:
        """Tokens that a micro-batch of ``strategy`` may hold beside ``home``, a multiple of tp; 0 where none fit."""
        stage = self._profile.stage(strategy)
        empty = self.bucket(strategy, home, micro_batch_tokens=0, hot=hot)
        free = self.limit_bytes - empty.total_bytes
        tokens = max(0, math.floor(free / (stage.activation_bytes_per_token * (1 + empty.error))))
        return tokens // strategy.tp * strategy.tp


def _same(first: ParallelStrategy, second: ParallelStrategy) -> bool:
    return str(first) == str(second)
