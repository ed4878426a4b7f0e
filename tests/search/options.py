"""Strategy options with published costs, for tests."""

import numpy as np

from hotspa_plugin.cost import published_profile
from hotspa_plugin.data import BucketSpec
from hotspa_plugin.search import StrategyOption
from hotspa_plugin.strategy import ParallelStrategy

PROFILE = published_profile("llama-7b")


def option(
    spec: str, num_ranks: int, capacity_tokens: int, transition_s: float = 0.0, *, ranks_per_core: float = 1.0
) -> StrategyOption:
    strategy = ParallelStrategy.parse(spec).resolve(num_ranks)
    return StrategyOption(
        spec=BucketSpec(
            bound_tokens=capacity_tokens,
            num_replicas=strategy.dp,
            num_stages=strategy.pp,
            length_multiple=strategy.tp,
        ),
        cost=PROFILE.stage(strategy).cost,
        transition_s=transition_s,
        ranks_per_core=ranks_per_core,
    )


def skewed_lengths(seed: int, count: int, longest: int = 32768) -> np.ndarray:
    generator = np.random.RandomState(seed)
    return np.clip(np.exp(generator.normal(7.3, 1.2, count)).astype(np.int64), 16, longest)
