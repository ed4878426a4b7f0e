"""What ``hotspa bench train`` lets race: chosen from a profile, before anything is measured."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

from hotspa_plugin.cli import options
from hotspa_plugin.cli import planning_options as shared

if TYPE_CHECKING:
    from hotspa_plugin.cost import Profile
    from hotspa_plugin.integrations.megatron.bench_train import Contender

# A static strategy that is predicted so much slower than the fastest one, beyond the profile's error, is left out.
HOPELESS = 1.5
# A contender that is predicted so much slower takes part in a few rounds: more would not change what is said of it.
SLOW, SLOW_ROUNDS = 3.0, 2


def choose_contenders(
    profile: Profile, num_ranks: int, workload: str, batches: list[Any], batch_tokens: int, context: int,
    pool_spec: str, home: str | None, limit: int | None, recompute: bool, seed: int,
) -> tuple[list[Contender], dict[str, str], dict[str, float]]:  # fmt: skip
    """(contenders, static strategies left out and why, predicted step seconds), all fixed before measuring.

    Plans from batches of the same workload but of another seed; of the measured ones only the longest length is known.
    """
    from hotspa_plugin.integrations.megatron.bench_train import Contender
    from hotspa_plugin.search import BatchAssigner, StepModel, candidate_strategies, check_lengths, make_plan, predict
    from hotspa_plugin.search.stock_assignment import StockAssigner
    from hotspa_plugin.search.workloads import workload_batches

    model = StepModel(profile, num_ranks=num_ranks, memory_limit_bytes=limit)
    modes = shared.recompute_modes(recompute)
    candidates = candidate_strategies(profile, num_ranks, recompute=modes)
    drawn = workload_batches(workload, 24, batch_tokens=batch_tokens, longest_tokens=context, seed=seed + 1)
    longest = max(int(lengths.max()) for lengths in (*drawn, *batches))
    check_lengths(model, candidates, longest)
    contenders: list[Contender] = []
    predicted: dict[str, float] = {}
    left_out: dict[str, str] = {}

    static = {}
    for strategy in candidates:
        pool = model.static_pool(strategy, longest)
        if pool is None:
            left_out[str(strategy)] = f"{longest} tokens do not fit in memory"
        else:
            static[str(strategy)] = predict(model, pool, drawn[:8])
    errors = [profile.time_error if s.time_error is None else s.time_error for s in profile.stages]
    hopeless = HOPELESS * (1 + max(errors))
    best_s = min(p.mean.total_s for p in static.values())
    for name, prediction in sorted(static.items(), key=lambda item: item[1].mean.total_s):
        predicted[name] = prediction.mean.total_s
        slower = prediction.mean.total_s / best_s
        if slower > hopeless:
            left_out[name] = f"predicted {slower:.2f} times slower than the fastest static one"
            continue
        pool = prediction.pool
        assigner = BatchAssigner(model.options(pool))
        contenders.append(Contender(name=name, kind="static", pool=pool.strategy_pool, assigner=assigner))

    if pool_spec == "auto":
        plan = make_plan(model, lambda number: drawn[number % len(drawn)], recompute=modes, longest_tokens=longest)
        hot = plan.chosen_per_batch.pool
    else:
        parsed = options.parse_pool(pool_spec, home).check(world_size=num_ranks, model=profile.model.shape())
        hot = model.hot_pool(parsed.entries, parsed.home)
    name = f"hot {hot}"
    predicted[name] = predict(model, hot, drawn[:8], per_batch=True).mean.total_s
    contenders.insert(
        0, Contender(name=name, kind="hot", pool=hot.strategy_pool, assigner=BatchAssigner(model.options(hot)))
    )

    contenders += _deepspeed(contenders, predicted, left_out)

    def rows_s(spec: str, packing: str) -> float:  # mean seconds of full rows over some batches
        strategy = static[spec].pool.home
        stock = StockAssigner(num_replicas=strategy.dp, context_tokens=context, packing=packing)
        num_rows = [max(map(len, stock.assign(lengths).buckets[0].replicas)) for lengths in drawn[:8]]
        return profile.stage(strategy).cost.packed_s([context]) * (sum(num_rows) / len(num_rows) + strategy.pp - 1)

    holding = [spec for spec in static if static[spec].pool.micro_batch_tokens[0] >= context]
    if not holding:
        left_out["stock"] = f"no strategy holds rows of {context} tokens in memory"
        return contenders, left_out, predicted
    best = static[min(holding, key=lambda spec: rows_s(spec, "padded"))].pool
    for packing in ("padded", "packed"):
        name = f"stock {packing} {best.home}"
        predicted[name] = rows_s(str(best.home), packing) if packing == "padded" else None
        slow = rows_s(str(best.home), packing) > SLOW * best_s
        assigner = StockAssigner(num_replicas=best.home.dp, context_tokens=context, packing=packing)
        contenders.append(
            Contender(name=name, kind="stock", pool=best.strategy_pool, assigner=assigner, packing=packing,
                      num_rounds=SLOW_ROUNDS if slow else None)
        )  # fmt: skip
    return contenders, left_out, predicted


def choose_rivals(
    profile: Profile, num_ranks: int, hot: Contender, limit: int | None, recompute: bool
) -> list[Contender]:
    """Every strategy that could have run one of the buckets of ``hot`` under the limit, if nothing else was held."""
    from hotspa_plugin.integrations.megatron.bench_train import Contender
    from hotspa_plugin.search import BatchAssigner, StepModel, candidate_strategies

    if len(hot.pool.entries) == 1:
        return []
    model = StepModel(profile, num_ranks=num_ranks, memory_limit_bytes=limit)
    rivals = []
    for strategy in candidate_strategies(profile, num_ranks, recompute=shared.recompute_modes(recompute)):
        holding = [p for e in hot.pool.entries if (p := model.static_pool(strategy, e.bound_tokens)) is not None]
        if holding:
            assigner = BatchAssigner(model.options(holding[-1]))
            name, pool = f"alone {strategy}", holding[-1].strategy_pool
            rivals.append(Contender(name=name, kind="alone", pool=pool, assigner=assigner))
    return rivals


def _deepspeed(contenders: list[Contender], predicted: dict[str, float], left_out: dict[str, str]) -> list[Contender]:
    """The static strategy that is predicted fastest, trained by DeepSpeed's engine with ZeRO 1."""
    fastest = next((c for c in contenders if c.kind == "static"), None)
    if fastest is None or importlib.util.find_spec("deepspeed") is None:
        left_out["deepspeed"] = "the package is not installed"
        return []
    name = f"deepspeed zero1 {fastest.name}"
    predicted[name] = predicted[fastest.name]
    return [dataclasses.replace(fastest, name=name, engine="deepspeed")]
