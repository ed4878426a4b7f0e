"""The executor over the loopback transport: bit-exact parameters, exact gradients, bounded memory."""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspa_plugin.layout import GPTSizes, gpt_layout
from hotspa_plugin.resharding import build_flush_plan, build_switch_plan, verify_flush, verify_switch
from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.transports import LoopbackWorld
from hotspa_plugin.resharding.verifier import replay
from hotspa_plugin.runtime.mover import BackgroundMover
from tests.resharding.test_plans import POLICIES, pairs
from tests.resharding.worlds import (
    LLAMA,
    SMALL,
    assert_filled,
    box,
    fill,
    layout,
    local_tensors,
    node_of_rank,
    random_globals,
    run_loopback,
    strategies,
    tp_copies_agree,
    view,
)


def switch(plan, dtype=torch.float32, budget=None, times=1):
    values = random_globals(plan.source, 1, dtype)
    sources = [local_tensors(plan.source, rank, dtype, float("nan")) for rank in range(plan.num_ranks)]
    destinations = [local_tensors(plan.destination, rank, dtype, float("nan")) for rank in range(plan.num_ranks)]
    for rank, tensors in enumerate(sources):
        fill(plan.source, rank, tensors, values)
    stats = run_loopback(plan, sources, destinations, budget, times)
    for rank, tensors in enumerate(destinations):
        assert_filled(plan.destination, rank, tensors, values)
    return stats


def flush(plan, budget=None, **options):
    """Flushes small integers (exact in any order) and returns home's gradients."""
    generator = torch.Generator().manual_seed(2)
    total = {spec.name: torch.zeros(spec.shape) for spec in plan.source.tensors}
    sources = [local_tensors(plan.source, rank, torch.float32, 0) for rank in range(plan.num_ranks)]
    homes = [local_tensors(plan.destination, rank, torch.float32, 0) for rank in range(plan.num_ranks)]
    shared = {}
    for rank, tensors in enumerate(sources):
        for shard in plan.source.shards(rank):
            key = (shard.tensor, shard.region, int(plan.source.dp_rank[rank]), shard.stage_copy)
            values = torch.randint(-50, 50, shard.region.shape, generator=generator).float()
            counted = True
            if shard.gradient_class.value == "identical":
                counted = key not in shared
                values = shared.setdefault(key, values)
            if counted:
                total[plan.source.tensors[shard.tensor].name][box(shard)] += values
            view(tensors, shard).copy_(values)
    stats = run_loopback(plan, sources, homes, budget, **options)
    assert tp_copies_agree(plan.destination, homes)
    got = {spec.name: torch.zeros(spec.shape) for spec in plan.source.tensors}
    seen = set()
    for rank, tensors in enumerate(homes):
        for shard in plan.destination.shards(rank):
            key = (shard.tensor, shard.region, int(plan.destination.dp_rank[rank]), shard.stage_copy)
            if shard.gradient_class.value != "identical" or key not in seen:
                got[plan.destination.tensors[shard.tensor].name][box(shard)] += view(tensors, shard)
            seen.add(key)
    for name, values in total.items():
        assert torch.equal(values, got[name]), name
    return stats


@settings(max_examples=15, deadline=None)
@given(pairs(sizes=(2, 4, 6, 8, 12)), st.sampled_from(POLICIES), st.sampled_from([None, 1500, 5000, 10**6]))
def test_switch_and_flush_are_exact_under_any_budget(pair, policy, budget):
    home, strategy, nodes = pair
    plan = build_switch_plan(home, strategy, policy=policy, node_of_rank=nodes)
    for stats in (switch(plan, budget=budget), flush(build_flush_plan(strategy, home, plan), budget)):
        for one in stats:
            assert one.peak_extra_bytes <= one.predicted_peak_extra_bytes
            assert budget is None or one.peak_extra_bytes <= budget
            assert one.num_rounds == stats[0].num_rounds


def test_stats_add_up_and_runs_repeat():
    plan = build_switch_plan(layout(LLAMA, 8, 2, 2), layout(LLAMA, 8, 4, 1))
    stats = switch(plan, dtype=torch.bfloat16, times=3)
    remote = sum(int(m.num_elements[m.source_rank != m.destination_rank].sum()) for m in plan.hops)
    local = sum(int(m.num_elements[m.source_rank == m.destination_rank].sum()) for m in plan.hops)
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats) == 2 * remote > 0
    assert sum(s.local_bytes for s in stats) == 2 * local > 0
    assert len(switch(plan, budget=600)) == 8 and switch(plan, budget=600)[0].num_rounds > 1


def test_storages_may_be_released_between_runs():
    plan = build_switch_plan(layout(LLAMA, 4, 2, 2), layout(LLAMA, 4, 1, 2))
    values = random_globals(plan.source, 1, torch.float32)
    sources = [local_tensors(plan.source, rank, torch.float32, 0) for rank in range(4)]
    destinations = [local_tensors(plan.destination, rank, torch.float32, 0) for rank in range(4)]
    world = LoopbackWorld(4)
    executors = [ReshardExecutor(plan, r, world.transport(r), sources[r], destinations[r]) for r in range(4)]
    sizes = [{name: t.untyped_storage().nbytes() for name, t in ts.items()} for ts in destinations]
    for turn in range(3):
        for rank, tensors in enumerate(sources):
            fill(plan.source, rank, tensors, {name: value + turn for name, value in values.items()})
            for name, tensor in destinations[rank].items():
                tensor.untyped_storage().resize_(sizes[rank][name])
                tensor.fill_(float("nan"))
        world.run(executors)
        for rank, tensors in enumerate(destinations):
            assert_filled(plan.destination, rank, tensors, {name: value + turn for name, value in values.items()})
            for tensor in tensors.values():
                tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(("home_sp", "ranks_per_node"), [(False, 8), (False, 2), (True, 4)])
def test_additions_happen_in_order_of_source_rank(home_sp, ranks_per_node):
    """fp32 sums of values of mixed size depend on their order: the oracle adds row by row, by source rank."""
    home, strategy = layout(LLAMA, 8, 4, 1, home_sp), layout(LLAMA, 8, 1, 1)
    nodes = node_of_rank(8, ranks_per_node)
    plan = build_flush_plan(strategy, home, build_switch_plan(home, strategy, node_of_rank=nodes))
    generator = torch.Generator().manual_seed(3)

    def gradients():
        generator.manual_seed(3)
        found = [local_tensors(strategy, rank, torch.float32, 0) for rank in range(8)]
        for tensors in found:
            for tensor in tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 10.0 ** torch.randint(-6, 6, (1,)).item())
        return found

    torch.manual_seed(4)
    sources = gradients()
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in sources]
    homes = [local_tensors(home, rank, torch.float32, 0) for rank in range(8)]
    run_loopback(plan, sources, homes)
    assert tp_copies_agree(home, homes)
    expected = [local_tensors(home, rank, torch.float32, 0) for rank in range(8)]
    arrays = tuple(
        {(rank, name): tensor.numpy() for rank, tensors in enumerate(side) for name, tensor in tensors.items()}
        for side in (copies, expected)
    )

    def add(target, values, moves, row):
        target += values

    replay(plan, arrays, add)
    for rank in range(8):
        for name, tensor in expected[rank].items():
            assert torch.equal(tensor, homes[rank][name]), (rank, name)


def test_shared_storage_is_read_before_it_is_overwritten():
    """Both layouts in one slab per rank: everything that leaves is staged first."""
    first, second = layout(LLAMA, 8, 2, 2), layout(LLAMA, 8, 4, 1)
    plan = build_switch_plan(first, second)
    values = random_globals(first, 1, torch.float32)
    sources, destinations = [], []
    for rank in range(8):
        both = local_tensors(first, rank, torch.float32, 0), local_tensors(second, rank, torch.float32, 0)
        slab = torch.zeros(max(sum(t.numel() for t in ts.values()) for ts in both))
        for ts, found in zip(both, (sources, destinations), strict=True):
            start, views = 0, {}
            for name, tensor in ts.items():
                views[name] = slab[start : start + tensor.numel()]
                start += tensor.numel()
            found.append(views)
        fill(first, rank, sources[rank], values)
    run_loopback(plan, sources, destinations)
    for rank in range(8):
        assert_filled(second, rank, destinations[rank], values)
    with pytest.raises(ValueError, match="share storage"):
        run_loopback(plan, sources, destinations, 500)


@pytest.mark.parametrize("budget", [None, 3000])
def test_gradients_may_travel_in_bf16_and_are_summed_in_fp32(budget):
    home, strategy = layout(SMALL, 8, 2, 2, False), layout(SMALL, 8, 1, 1)
    plan = build_flush_plan(strategy, home, build_switch_plan(home, strategy, node_of_rank=node_of_rank(8, 4)))
    wide = flush(plan, budget)
    narrow = flush(plan, budget, wire_dtype=torch.bfloat16)  # integers up to 50, and sums of few, fit bf16 exactly
    assert sum(s.sent_bytes for s in wide) == 2 * sum(s.sent_bytes for s in narrow) > 0
    assert [s.local_bytes for s in wide] == [s.local_bytes for s in narrow]
    assert budget is None or max(s.peak_extra_bytes for s in narrow) <= budget


def test_an_error_in_the_background_reaches_the_one_who_waits():
    plan = build_switch_plan(layout(LLAMA, 2, 2, 1), layout(LLAMA, 2, 1, 1))
    tensors = [local_tensors(one, 0, torch.float32, 0) for one in (plan.source, plan.destination)]
    mover = BackgroundMover()
    executor = ReshardExecutor(plan, 0, LoopbackWorld(2).transport(0), *tensors)
    first, second = mover.submit(executor), mover.submit(executor)
    with pytest.raises(RuntimeError, match="rank 0 waits for a message that rank 1 has not sent"):
        first.wait()
    with pytest.raises(RuntimeError, match="the move before this one failed"):
        second.wait()


def test_errors_name_the_tensor():
    plan = build_switch_plan(layout(LLAMA, 4, 2, 2), layout(LLAMA, 4, 1, 2))
    source = local_tensors(plan.source, 0, torch.float32, 0)
    destination = local_tensors(plan.destination, 0, torch.float32, 0)
    transport = LoopbackWorld(4).transport(0)
    name = "embedding.word_embeddings.weight"
    with pytest.raises(ValueError, match=f"source tensor {name}.*is missing on rank 0"):
        ReshardExecutor(plan, 0, transport, {k: v for k, v in source.items() if k != name}, destination)
    with pytest.raises(ValueError, match=f"tensor {name} is torch.float32 in one place and torch.bfloat16"):
        ReshardExecutor(plan, 0, transport, source, {**destination, name: destination[name].bfloat16()})
    with pytest.raises(ValueError, match=f"{name} must be contiguous with at least"):
        ReshardExecutor(plan, 0, transport, {**source, name: source[name][:-1]}, destination)
    with pytest.raises(ValueError, match="budget of 10 bytes cannot hold one row of tensor .*give at least"):
        ReshardExecutor(plan, 0, transport, source, destination, 10)


@st.composite
def random_pairs(draw):
    """Home and strategy of a random model on 2 to 64 ranks, and the ranks' nodes."""
    num_ranks = draw(st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]))
    heads = draw(st.sampled_from([12, 24]))
    sizes = GPTSizes(
        num_layers=draw(st.sampled_from([1, 2, 3, 5])),
        hidden_size=heads * draw(st.integers(1, 2)),
        ffn_hidden_size=12 * draw(st.integers(1, 4)),
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from([12, heads])),
        vocab_size=draw(st.integers(1, 60)),
        gated_mlp=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        num_learned_positions=draw(st.integers(0, 9)),
        biases=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        dtype="float32",
    )
    found = []
    for _ in range(2):
        tp, pp = draw(st.sampled_from(strategies(num_ranks, pps=(1, 2, 3, 4))))
        cuts = sorted(draw(st.lists(st.integers(0, sizes.num_layers), min_size=pp - 1, max_size=pp - 1)))
        stages = tuple(np.diff([0, *cuts, sizes.num_layers]).tolist())  # uneven, even empty
        found.append(
            gpt_layout(
                sizes,
                tp=tp,
                pp=pp,
                dp=num_ranks // (tp * pp),
                sequence_parallel=draw(st.booleans()),
                vocab_divisor=12,
                layers_of_stage=stages,
            )
        )
    return found[0], found[1], node_of_rank(num_ranks, draw(st.sampled_from([1, 2, 3, 4, 8, 16])))


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_pairs(), st.sampled_from(POLICIES), st.sampled_from([None, 8000, 30_000, 10**6]))
def test_500_random_pairs(pair, policy, budget):
    home, strategy, nodes = pair
    plan = build_switch_plan(home, strategy, policy=policy, node_of_rank=nodes)
    back = build_flush_plan(strategy, home, plan)
    verify_switch(plan)
    verify_flush(back)
    for run in (lambda bytes_: switch(plan, budget=bytes_), lambda bytes_: flush(back, bytes_)):
        stats, given_bytes = with_budget(run, budget)
        for one in stats:
            assert one.peak_extra_bytes == one.predicted_peak_extra_bytes or one.num_rounds == 0
            assert given_bytes is None or one.peak_extra_bytes <= given_bytes


def with_budget(run, budget):
    """``run(budget)`` and the budget; where that is too small, with what the refusals ask for, which must do."""
    for _ in range(4):  # another hop, or the other way, may need more
        try:
            return run(budget), budget
        except ValueError as error:
            needed = int(re.search(r"give at least (\d+) bytes", str(error))[1])
            assert needed > budget
            budget = needed
    raise AssertionError(f"a budget of {budget} bytes is refused, though it was asked for")
