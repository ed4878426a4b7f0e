"""Seconds that moving parameters and gradients takes: switches, flushes, and home's own gradient reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hotspa_plugin.cost.profile import Profile, Rate
from hotspa_plugin.layout import ShardLayout, gpt_layout
from hotspa_plugin.resharding import ReshardPlan, build_flush_plan, build_switch_plan
from hotspa_plugin.resharding.bounds import SwitchCosts, plan_costs
from hotspa_plugin.strategy import ParallelStrategy
from hotspa_plugin.topology import Cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transition:
    """Going to a strategy and bringing its gradients home. Bytes are over all ranks."""

    switch_s: float
    flush_s: float
    switch_remote_bytes: int = 0
    switch_cross_node_bytes: int = 0
    flush_remote_bytes: int = 0
    flush_cross_node_bytes: int = 0

    @property
    def total_s(self) -> float:
        return self.switch_s + self.flush_s


STAY = Transition(switch_s=0.0, flush_s=0.0)


def rate_at(rates: Sequence[Rate], num_ranks: int) -> float:
    """Bytes per second as measured with ``num_ranks`` ranks: the nearest count below it, else the smallest."""
    below = [rate for rate in rates if rate.num_ranks <= num_ranks]
    nearest = max(below, key=lambda r: r.num_ranks) if below else min(rates, key=lambda r: r.num_ranks)
    return nearest.bytes_per_s


class CommunicationModel:
    """Prices the bytes of this project's own reshard plans by the links of a profile.

    Plans are made once per pair of (tp, pp) and kept. The time of a plan is: a latency per hop; what the busiest
    network card passes between nodes; what the busiest rank sends or receives at all, at the rate inside a node; and
    the copies in a rank's own memory. The parts are added, since a hop inside a node waits for the one between nodes.
    """

    def __init__(
        self, profile: Profile, *, num_ranks: int, ranks_per_node: int | None = None, policy: str = "balanced"
    ) -> None:
        links = profile.links
        self._profile, self._policy = profile, policy
        ranks_per_node = min(ranks_per_node or profile.machine.ranks_per_node, num_ranks)
        # Where nodes are filled in part, so are their cards.
        cards = max(n for n in range(1, ranks_per_node + 1) if n <= links.cards_per_node and ranks_per_node % n == 0)
        self.cluster = Cluster(num_ranks=num_ranks, ranks_per_node=ranks_per_node, cards_per_node=cards)
        self._intra_bytes_per_s = rate_at(links.intra_node, ranks_per_node)
        self._inter_bytes_per_s = rate_at(links.inter_node, num_ranks)
        self._layouts: dict[tuple[int, int], ShardLayout] = {}
        self._transitions: dict[tuple[tuple[int, int], tuple[int, int], int], Transition] = {}

    def layout(self, strategy: ParallelStrategy) -> ShardLayout:
        key = (strategy.tp, strategy.pp)
        if key not in self._layouts:
            tp, pp = key
            dp = self.cluster.num_ranks // (tp * pp)
            self._layouts[key] = gpt_layout(self._profile.model.gpt_sizes(), tp=tp, pp=pp, dp=dp)
        return self._layouts[key]

    def transition(self, home: ParallelStrategy, strategy: ParallelStrategy, *, gradient_bytes: int = 4) -> Transition:
        """From home's parameters to ``strategy`` and back with its gradients of so many bytes each.

        Free where the strategies are one; where they differ in recomputation only, all that is left is copying.
        """
        if str(home) == str(strategy):
            return STAY
        key = ((home.tp, home.pp), (strategy.tp, strategy.pp), gradient_bytes)
        if key not in self._transitions:
            self._transitions[key] = self._plan(home, strategy, gradient_bytes)
        return self._transitions[key]

    def _plan(self, home: ParallelStrategy, strategy: ParallelStrategy, gradient_bytes: int) -> Transition:
        nodes, cards = self.cluster.node_of_rank, self.cluster.card_of_rank
        source, destination = self.layout(home), self.layout(strategy)
        switch = build_switch_plan(source, destination, policy=self._policy, node_of_rank=nodes, card_of_rank=cards)
        flush = build_flush_plan(destination, source, switch)
        there, back = plan_costs(switch), plan_costs(flush, item_size_bytes=gradient_bytes)
        return Transition(
            switch_s=self._seconds(switch, there, self._profile.memory.parameter_bytes),
            flush_s=self._seconds(flush, back, gradient_bytes),
            switch_remote_bytes=there.remote_bytes,
            switch_cross_node_bytes=there.cross_node_bytes,
            flush_remote_bytes=back.remote_bytes,
            flush_cross_node_bytes=back.cross_node_bytes,
        )

    def _seconds(self, plan: ReshardPlan, costs: SwitchCosts, item_size_bytes: int) -> float:
        away = plan.destination if not plan.accumulate else plan.source
        copied = max(sum(shard.region.num_elements for shard in holding) for holding in away.holdings) * item_size_bytes
        seconds = copied / self._profile.links.copy_bytes_per_s
        if costs.remote_bytes:
            seconds += plan.num_hops * self._profile.links.latency_s
            seconds += max(costs.max_send_bytes, costs.max_receive_bytes) / self._intra_bytes_per_s
            seconds += costs.max_card_bytes / self._inter_bytes_per_s
        return seconds

    def least_transition_s(self, home_parameters: int, strategy_parameters: int, *, gradient_bytes: int = 4) -> float:
        """A lower bound of a transition's seconds, from the parameters of a rank under both: what it must lack."""
        both_bytes = self._profile.memory.parameter_bytes + gradient_bytes
        lacking = max(0, strategy_parameters - home_parameters)
        return both_bytes * (
            lacking / self._intra_bytes_per_s + strategy_parameters / self._profile.links.copy_bytes_per_s
        )

    def reduce_s(self, home: ParallelStrategy, num_parameters: int) -> float:
        """Seconds of home's data-parallel gradient reduction and, with a distributed optimizer, parameter gathering.

        A ring of dp ranks passes (dp - 1) / dp of all bytes twice: as a reduce-scatter of gradients and an all-gather
        of gradients or (distributed optimizer) parameters, whose rate is the all-reduce's bus bandwidth.
        """
        if home.dp == 1:
            return 0.0
        memory, links = self._profile.memory, self._profile.links
        second = memory.parameter_bytes if memory.distributed_optimizer else memory.gradient_bytes
        num_bytes = num_parameters * (memory.gradient_bytes + second) * (home.dp - 1) / home.dp
        in_node = max(1, self.cluster.ranks_per_node // home.tp)
        if home.dp <= in_node:
            rate = rate_at(links.all_reduce_in_node, home.dp)
        else:
            rate = rate_at(links.all_reduce_between_nodes, in_node)
        return num_bytes / rate + links.latency_s
