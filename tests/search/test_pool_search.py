import dataclasses
import itertools

import numpy as np
import pytest

from hotspa_plugin.cost import published_profile
from hotspa_plugin.data import draw_lengths
from hotspa_plugin.search import PoolSearch, StepModel, candidate_strategies, check_lengths, make_plan, predict
from hotspa_plugin.search.planning import refine_bounds

CONTEXT = 16384


@pytest.fixture(scope="module")
def model():
    return StepModel(published_profile("llama-13b"), num_ranks=8)


@pytest.fixture(scope="module")
def batches():
    return [np.append(draw_lengths("wikipedia", 127, seed=seed, max_tokens=CONTEXT), CONTEXT) for seed in range(3)]


def test_candidates_fit_ranks_and_model(model):
    found = candidate_strategies(model.profile, 8, recompute=("none",))
    assert {str(s) for s in found} == {"tp1", "pp2", "pp4", "pp8", "tp2", "tp2pp2", "tp2pp4", "tp4", "tp4pp2", "tp8"}
    assert all(s.dp * s.tp * s.pp == 8 for s in found)
    with pytest.raises(ValueError, match="7 ranks|no strategy"):
        candidate_strategies(published_profile("llama-32b"), 7)


def test_the_program_finds_what_trying_everything_finds(model, batches):
    candidates = [s for s in candidate_strategies(model.profile, 8, recompute=("none",)) if str(s) in
                  ("pp8", "tp4", "tp4pp2", "tp8")]  # fmt: skip
    search = PoolSearch(model, candidates, batches)
    found = search.hot(num_best=1)[0]

    cuts = search._tables.cuts_tokens
    best = np.inf
    for home in candidates:
        capacity = {s: model.memory.capacity_tokens(s, home) for s in candidates}
        if capacity[home] == 0:
            continue
        for size in (2, 3, 4):
            for order in itertools.permutations(candidates, size):
                if home not in order:
                    continue
                for inner in itertools.combinations(range(1, len(cuts) - 1), size - 1):
                    highs = (*inner, len(cuts) - 1)
                    total, low = search._home_s(home, capacity[home]), 0
                    for strategy, high in zip(order, highs, strict=True):
                        total += search._mean_bucket_s(strategy, capacity[strategy])[low, high]
                        total += search._filled[low, high] * model.transition(home, strategy).total_s
                        low = high
                    best = min(best, total)
    assert found.estimate_s == pytest.approx(best)


def test_everything_found_fits_and_is_a_valid_pool(model, batches):
    search = PoolSearch(model, candidate_strategies(model.profile, 8), batches)
    for found in (*search.static(), *search.hot()):
        pool = found.pool.strategy_pool.check(world_size=8, model=model.profile.model.shape())
        assert pool.bounds_tokens[-1] == CONTEXT
        for memory in model.bucket_memory(found.pool):
            assert memory.total_bytes <= model.memory.limit_bytes


def test_impossible_limits_name_the_nearest_possible():
    small = StepModel(published_profile("llama-13b"), num_ranks=8, memory_limit_bytes=10**10)
    candidates = candidate_strategies(small.profile, 8)
    with pytest.raises(
        ValueError, match=r"memory limit of 10.00 GB.*the least.*is (\d+\.\d+) GB, with (\S+)"
    ) as refused:
        check_lengths(small, candidates, 4096)
    gigabytes = float(str(refused.value).rpartition(" is ")[2].split()[0])
    enough = StepModel(small.profile, num_ranks=8, memory_limit_bytes=round(gigabytes * 1e9 + 5e6))
    check_lengths(enough, candidates, 4096)


def test_lengths_over_every_strategy_name_the_nearest_possible(model):
    candidates = candidate_strategies(model.profile, 8, recompute=("none",))
    with pytest.raises(ValueError, match=r"sequences of 999999 tokens.*the most is (\d+) tokens, with tp8") as refused:
        check_lengths(model, candidates, 999_999)
    most = int(str(refused.value).partition("the most is ")[2].split()[0])
    check_lengths(model, candidates, most)


def test_refined_bounds_are_faster_on_their_batches_and_still_fit(model, batches):
    search = PoolSearch(model, candidate_strategies(model.profile, 8), batches)
    found = search.hot(num_best=1)[0].pool
    # from bounds that are clearly off
    entries = list(found.entries)
    entries[0] = dataclasses.replace(entries[0], bound_tokens=int(search.cuts_tokens[1]))
    off = dataclasses.replace(found, entries=tuple(entries))
    refined = refine_bounds(model, off, search.cuts_tokens, batches)
    assert predict(model, refined, batches).mean.total_s < predict(model, off, batches).mean.total_s
    assert refined.strategy_pool.strategies == found.strategy_pool.strategies
    for entry, tokens in zip(refined.entries, refined.micro_batch_tokens, strict=True):
        assert entry.bound_tokens <= tokens


def test_a_skewed_batch_is_switched_and_a_uniform_one_is_not(model):
    skewed = make_plan(model, lambda seed: draw_lengths("wikipedia", 256, seed=seed, max_tokens=32768))
    assert skewed.advises_hot and skewed.gain.certainty in ("clear", "likely")
    assert skewed.hot_per_batch.mean.total_s <= skewed.hot[0].mean.total_s * 1.01
    uniform = make_plan(model, lambda seed: np.full(256, 2048))
    assert not uniform.advises_hot and uniform.chosen is uniform.statics[0]
    order = [p.mean.total_s for p in skewed.statics]
    assert order == sorted(order)


def test_a_step_on_shared_cores_takes_what_its_assignment_says(model):
    """Pipelines lose their bubbles there, so that a strategy with stages may become the fastest."""
    profile = model.profile
    machine = profile.machine.model_copy(update={"ranks_per_core": 2.0})
    shared = StepModel(profile.model_copy(update={"machine": machine}), num_ranks=model.num_ranks)
    lengths = draw_lengths("wikipedia", 64, seed=1, max_tokens=8192)
    for strategy in candidate_strategies(profile, shared.num_ranks):
        if (pool := shared.static_pool(strategy, 8192)) is None:
            continue
        (option,), assignment = shared.options(pool), shared.assign(pool, lengths)
        time, before = shared.step_time(pool, lengths), model.step_time(pool, lengths)
        assert time.compute_s + time.bubble_s == pytest.approx(option.bucket_s(assignment.buckets[0]))
        assert time.compute_s + time.bubble_s < before.compute_s + before.bubble_s or strategy.dp == strategy.pp == 1
        assert time.bubble_s <= before.bubble_s
