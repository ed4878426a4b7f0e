"""Measuring through the real trainer, and the benchmark that races contenders in one set of processes."""

import numpy as np
import pytest

from hotspa_plugin.config import ModelConfig
from hotspa_plugin.config.sizes import model_sizes
from hotspa_plugin.cost import Profile
from hotspa_plugin.search import BatchAssigner, StepModel, candidate_strategies
from hotspa_plugin.search.stock_assignment import StockAssigner
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool

MODEL = ModelConfig.model_validate(
    {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 256}
)
SIZES = model_sizes(MODEL, num_ranks=2, max_positions=256, dtype="fp32")
PROFILING = "hotspa_plugin.integrations.megatron.profiling:profile_rank"
BENCH = "hotspa_plugin.integrations.megatron.bench_train"


@pytest.fixture(scope="module")
def measured():
    return {}


def profile_of(workers, measured):
    if not measured:
        from hotspa_plugin.integrations.megatron.profiling import ProfileRequest

        request = ProfileRequest(
            model=MODEL,
            sizes=SIZES,
            strategies=tuple(ParallelStrategy.parse(s).resolve(2) for s in ("tp1", "tp2", "pp2rc")),
            fitted_lengths=(32, 96, 256),
            unseen_lengths=(64, 160),
            num_repeats=1,
        )
        measured["ranks"] = workers.run(PROFILING, request=request)
    return measured["ranks"]


@pytest.mark.ranks(2)
def test_all_ranks_measure_one_valid_profile(workers, measured):
    first, second = profile_of(workers, measured)
    assert first == second
    profile = Profile.model_validate(first)
    assert [str(s.strategy) for s in profile.stages] == ["tp1", "tp2", "pp2rc"]
    for stage in profile.stages:
        assert stage.origin == "measured" and stage.time_error is not None and stage.memory_error is not None
        assert stage.cost.packed_s([256]) >= stage.cost.packed_s([32]) > 0
    assert profile.machine.num_ranks == 2
    assert profile.memory.reserved_bytes > 50e6  # what imports alone take
    assert profile.links.copy_bytes_per_s > profile.links.intra_node[0].bytes_per_s > 0


@pytest.mark.ranks(2)
def test_a_measured_profile_can_be_planned_with(workers, measured):
    profile = Profile.model_validate(profile_of(workers, measured)[0])
    model = StepModel(profile, num_ranks=2, memory_limit_bytes=4 * 10**9)
    candidates = candidate_strategies(profile, 2)
    assert {str(s) for s in candidates} == {"tp1", "tp2", "pp2rc"}
    for strategy in candidates:
        assert model.step_time(model.static_pool(strategy, 256), np.array([100, 256])).total_s > 0
    with pytest.raises(ValueError, match="measured with 2 ranks"):
        StepModel(profile, num_ranks=4)


def contenders(profile):
    from hotspa_plugin.integrations.megatron.bench_train import Contender

    model = StepModel(profile, num_ranks=2, memory_limit_bytes=4 * 10**9)
    hot = StrategyPool.parse("tp1:128 tp2:256").check(world_size=2)
    planned = model.hot_pool(hot.entries, hot.home)
    static = StrategyPool.parse("tp1:256").check(world_size=2)
    return [
        Contender(name="hot", kind="hot", pool=hot, assigner=BatchAssigner(model.options(planned))),
        Contender(name="tp1", kind="static", pool=static),
        Contender(name="stock", kind="stock", pool=static, packing="padded",
                  assigner=StockAssigner(num_replicas=2, context_tokens=256, packing="padded")),
        Contender(name="stock packed", kind="stock", pool=static,
                  assigner=StockAssigner(num_replicas=2, context_tokens=256, packing="packed")),
    ]  # fmt: skip


@pytest.mark.ranks(2)
def test_contenders_train_the_same_batches_to_the_same_losses(workers, measured, tmp_path):
    from hotspa_plugin.integrations.megatron.bench_train import Setup, run_workload, summarize

    entries = contenders(Profile.model_validate(profile_of(workers, measured)[0]))
    batches = [np.array(lengths) for lengths in ([20, 256, 9], [7, 100, 30, 250], [64, 64], [200, 12, 5])]
    setup = Setup(model=MODEL, sizes=SIZES, max_positions=256)
    steps, refused = run_workload(workers, setup, entries, batches, folder=str(tmp_path))
    assert not refused and all(len(taken) == 3 for taken in steps.values())
    for number in range(3):
        losses = {name: taken[number].loss for name, taken in steps.items()}
        assert max(losses.values()) - min(losses.values()) < 1e-5 * losses["tp1"], losses
        assert {taken[number].num_tokens for taken in steps.values()} == {int(batches[number + 1].sum())}
    result = summarize(entries, steps, refused)
    runs = {run["name"]: run for run in result["runs"]}
    assert runs["stock"]["padding_fraction"] > runs["stock packed"]["padding_fraction"] > 0
    # parameters, gradients and two moments in fp32, at least
    assert runs["tp1"]["peak_memory_bytes"] > 16 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 2 * 256 * 32)
    assert runs["tp1"]["exposed_switch_fraction"] == 0
    low, high = result["hot_over_best_static_range"]
    assert low <= result["hot_over_best_static"] <= high
    assert result["hot_over_best_static_tie"] == (low <= 1 <= high)


@pytest.mark.ranks(2)
def test_what_takes_more_memory_than_allowed_is_thrown_out(workers, measured, tmp_path):
    from hotspa_plugin.integrations.megatron.bench_train import Setup, run_workload, summarize

    entries = contenders(Profile.model_validate(profile_of(workers, measured)[0]))[:2]
    setup = Setup(model=MODEL, sizes=SIZES, max_positions=256)
    steps, refused = run_workload(
        workers, setup, entries, [np.array([256, 9])] * 2, folder=str(tmp_path), memory_limit_bytes=1
    )
    assert not steps and set(refused) == {"hot", "tp1"}
    result = summarize(entries, steps, refused)
    assert all("over the limit" in run["refused"] for run in result["runs"])
    assert result["hot_over_best_static"] is None


@pytest.mark.ranks(2)
def test_buckets_are_measured_alone_under_every_strategy_that_holds_them(workers, measured, tmp_path):
    from hotspa_plugin.integrations.megatron.bench_alone import BucketsAlone
    from hotspa_plugin.integrations.megatron.bench_train import Contender, Setup, run_workload

    hot = contenders(Profile.model_validate(profile_of(workers, measured)[0]))[0]
    pools = {spec: StrategyPool.parse(spec).check(world_size=2) for spec in ("tp1:128", "tp2:256")}
    rivals = [Contender(name=f"alone {spec}", kind="alone", pool=pool) for spec, pool in pools.items()]
    alone = BucketsAlone(hot, rivals)
    batches = [np.array(lengths) for lengths in ([20, 256, 9], [7, 100, 30, 250], [64, 64])]
    setup = Setup(model=MODEL, sizes=SIZES, max_positions=256)
    steps, refused = run_workload(workers, setup, [hot], batches, folder=str(tmp_path), alone=alone)
    assert not refused and set(alone.seconds) == {1, 2}  # the first batch warms up
    assert all(seconds > 0 for seconds in alone.seconds.values())
    assert all(taken.optimizer_s > 0 for taken in steps["hot"])
    assert 0 < alone.hot_over_alone(steps["hot"]) < 100
