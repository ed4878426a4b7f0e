"""``hotspa bench switch``, the part that needs no cluster: plans of many cases and policies against their bounds."""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pydantic

from hotspa_plugin.layout import GPTSizes, ShardLayout, gpt_layout
from hotspa_plugin.resharding.bounds import flush_costs, plan_costs, switch_bounds
from hotspa_plugin.resharding.flush_planner import build_flush_plan
from hotspa_plugin.resharding.plan import ReshardPlan
from hotspa_plugin.resharding.planner import POLICIES, build_switch_plan
from hotspa_plugin.resharding.roles import classify_nodes
from hotspa_plugin.resharding.rounds import predict_peak_extra_bytes, rounds_of_rank

# Policies that decide piece by piece take minutes beyond this many ranks.
MOST_RANKS_PIECE_BY_PIECE = 512


class _Shape(pydantic.BaseModel, extra="forbid"):
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int


class _Strategy(pydantic.BaseModel, extra="forbid"):
    tp: int
    pp: int
    dp: int
    up_to_tokens: int


class _Settings(pydantic.BaseModel, extra="forbid"):
    source: str
    models: dict[str, _Shape]
    settings: dict[str, list[_Strategy]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchCase:
    """One switch to plan: a model, a number of ranks, and (tp, pp) before and after."""

    name: str
    sizes: GPTSizes
    num_ranks: int
    source: tuple[int, int]
    destination: tuple[int, int]
    ranks_per_node: int = 8
    source_is_home: bool = False

    def layouts(self) -> tuple[ShardLayout, ShardLayout]:
        """The two layouts; ranks are ordered tensor, data, pipeline, innermost first."""
        divisor = int(np.lcm(self.source[0], self.destination[0]))
        before, after = (
            gpt_layout(self.sizes, tp=tp, pp=pp, dp=self.num_ranks // (tp * pp), vocab_divisor=divisor)
            for tp, pp in (self.source, self.destination)
        )
        return before, after

    @property
    def node_of_rank(self) -> np.ndarray:
        return np.arange(self.num_ranks) // self.ranks_per_node


def read_settings() -> _Settings:
    """The paper's models and pools, from the package's data."""
    file = importlib.resources.files("hotspa_plugin.resharding").joinpath("hotspa_settings.json")
    return _Settings.model_validate_json(file.read_text(encoding="utf-8"))


def _label(strategy: tuple[int, int]) -> str:
    named = [f"{axis}{count}" for axis, count in zip(("tp", "pp"), strategy, strict=True) if count > 1]
    return "".join(named) or "tp1"


def _pool_cases(
    title: str, sizes: GPTSizes, num_ranks: int, pool: Sequence[tuple[int, int]], seen: set[tuple]
) -> Iterator[SwitchCase]:
    """Every ordered pair of a pool's strategies, home (the last) to each first, without those already ``seen``."""
    home = pool[-1]
    pairs = [(home, other) for other in pool[:-1]]
    pairs += [pair for pair in itertools.permutations(pool, 2) if pair not in pairs]
    for source, destination in pairs:
        key = (sizes, num_ranks, source, destination)
        if key not in seen:
            seen.add(key)
            yield SwitchCase(
                name=f"{title}: {_label(source)} to {_label(destination)}",
                sizes=sizes,
                num_ranks=num_ranks,
                source=source,
                destination=destination,
                source_is_home=source == home,
            )


def switch_cases(num_ranks: int | None = None, model: str | None = None) -> list[SwitchCase]:
    """All cases: the paper's pools, two known switches of 7B on 32 ranks, the 32B pools on 128 to 4,096 ranks.

    ``num_ranks`` and ``model`` pick those that match; ValueError where none does.
    """
    settings = read_settings()
    models = {name: GPTSizes(**shape.model_dump(), dtype="bfloat16") for name, shape in settings.models.items()}
    cases: list[SwitchCase] = []
    seen: set[tuple] = set()
    for title, strategies in settings.settings.items():
        pool = [(s.tp, s.pp) for s in strategies]
        first = strategies[0]
        sizes = models[title.split(" ")[0]]
        cases += _pool_cases(title, sizes, first.tp * first.pp * first.dp, pool, seen)
    for source, destination in (((2, 1), (1, 2)), ((1, 4), (8, 1))):
        cases += [
            case
            for case in _pool_cases("llama-7b on 32", models["llama-7b"], 32, (destination, source), seen)
            if case.source == source
        ]
    pools = [[(s.tp, s.pp) for s in settings.settings[t]] for t in settings.settings if t.startswith("llama-32b on 32")]
    for ranks in (128, 512, 4096):
        for pool in pools:
            cases += _pool_cases(f"llama-32b on {ranks}", models["llama-32b"], ranks, pool, seen)
    picked = [
        case
        for case in cases
        if (num_ranks is None or case.num_ranks == num_ranks) and (model is None or case.name.startswith(model))
    ]
    if not picked:
        raise ValueError(
            f"no case has {num_ranks} ranks and model {model}: choose ranks among "
            f"{sorted({c.num_ranks for c in cases})} and a model among {', '.join(models)}"
        )
    return picked


def plan_rows(
    cases: Iterable[SwitchCase],
    policies: Sequence[str] = POLICIES,
    *,
    ranks_per_card: Sequence[int] = (8, 1),
    memory_budget_bytes: int | None = None,
) -> Iterator[dict[str, object]]:
    """One row per case, policy and number of ranks that share a network card.

    Policies that decide piece by piece are left out beyond ``MOST_RANKS_PIECE_BY_PIECE`` ranks. Bytes are those of
    the parameters; the flush is reckoned with elements of the same size.
    """
    for case in cases:
        for sharing in ranks_per_card:
            cards = np.arange(case.num_ranks) // sharing
            before, after = case.layouts()
            bounds = switch_bounds(before, after, node_of_rank=case.node_of_rank, card_of_rank=cards)
            without_nodes = switch_bounds(before, after).max_send_bytes
            for policy in policies:
                knows_cards = policy == "balanced"
                if not knows_cards and (case.num_ranks > MOST_RANKS_PIECE_BY_PIECE or sharing != ranks_per_card[0]):
                    continue
                yield _row(case, policy, sharing, cards, memory_budget_bytes, dataclasses.asdict(bounds), without_nodes)


def _row(
    case: SwitchCase,
    policy: str,
    sharing: int,
    cards: np.ndarray,
    memory_budget_bytes: int | None,
    bounds: dict[str, float],
    max_send_without_nodes: float,
) -> dict[str, object]:
    before, after = case.layouts()  # anew, so that nothing worked out for another plan is reused
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = build_switch_plan(before, after, policy=policy, node_of_rank=case.node_of_rank, card_of_rank=cards)
    plan.moves_of(0)
    plan_seconds, plan_cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    row: dict[str, object] = {
        "case": case.name,
        "policy": policy,
        "num_ranks": case.num_ranks,
        "ranks_per_node": case.ranks_per_node,
        "ranks_per_card": sharing,
        "rank_order": "tp-dp-pp",
        "sources": ("home" if case.source_is_home else "previous strategy") + f" {_label(case.source)}, all copies",
        "plan_seconds": plan_seconds,
        "plan_cpu_seconds": plan_cpu_seconds,
    }
    for name, value in dataclasses.asdict(plan_costs(plan)).items():
        row[name], row[f"{name}_bound"] = int(value), bounds[name]
    row["max_send_bytes_bound_without_nodes"] = max_send_without_nodes
    row["num_rounds"], row["peak_extra_bytes"] = _rounds_and_peak(plan, memory_budget_bytes)
    row |= flush_costs(build_flush_plan(after, before, plan), plan)
    return row


def _rounds_and_peak(plan: ReshardPlan, memory_budget_bytes: int | None) -> tuple[int, int]:
    """Rounds, and the most that a rank stages: of all ranks up to 64, beyond that of one rank per role."""
    ranks: Iterable[int] = range(plan.num_ranks)
    if plan.num_ranks > 64:
        classes = classify_nodes(plan.source, plan.destination, plan.node_of_rank, plan.card_of_rank)
        ranks = [int(nodes.ranks[0, columns[0]]) for nodes in classes for columns in nodes.columns_of_role]
    peaks = [predict_peak_extra_bytes(plan, rank, memory_budget_bytes=memory_budget_bytes) for rank in ranks]
    return len(rounds_of_rank(plan, 0, memory_budget_bytes=memory_budget_bytes)), max(peaks)
