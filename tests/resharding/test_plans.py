"""Switch and flush plans against the oracle, which replays every row over global indices."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.layout import GradientClass, Region, Shard, ShardLayout, TensorSpec
from hotspa_plugin.resharding import Routes, build_flush_plan, build_switch_plan, verify_flush, verify_switch
from tests.resharding.worlds import LLAMA, SMALL, layout, node_of_rank, strategies

POLICIES = ["balanced", "fcfs", "round_robin", "multi_node_round_robin", "greedy", "new_greedy"]


@st.composite
def pairs(draw, sizes=(2, 3, 4, 6, 8, 12, 24)):
    num_ranks = draw(st.sampled_from(sizes))
    model = draw(st.sampled_from([SMALL, LLAMA]))
    found = []
    for _ in range(2):
        tp, pp = draw(st.sampled_from(strategies(num_ranks)))
        found.append(layout(model, num_ranks, tp, pp, draw(st.booleans())))
    nodes = node_of_rank(num_ranks, draw(st.sampled_from([1, 2, 4, 8, 64])))
    return found[0], found[1], nodes


@settings(max_examples=40, deadline=None)
@given(pairs(), st.sampled_from(POLICIES))
def test_every_switch_writes_every_element_once_and_every_flush_counts_every_gradient_once(pair, policy):
    home, strategy, nodes = pair
    switch = build_switch_plan(home, strategy, policy=policy, node_of_rank=nodes)
    verify_switch(switch)
    flush = build_flush_plan(strategy, home, switch)
    verify_flush(flush)
    for rank in range(home.num_ranks):
        for hop, (mine, everything) in enumerate(zip(switch.moves_of(rank), switch.hops, strict=True)):
            rows = (everything.source_rank == rank) | (everything.destination_rank == rank)
            for field in dataclasses.fields(mine):
                assert np.array_equal(getattr(mine, field.name), getattr(everything.select(rows), field.name)), hop


@pytest.mark.parametrize("num_ranks", [64, 512])
def test_many_ranks(num_ranks):
    home, strategy = layout(LLAMA, num_ranks, 4, 2, True), layout(LLAMA, num_ranks, 2, 1, True)
    switch = build_switch_plan(home, strategy, node_of_rank=node_of_rank(num_ranks, 8))
    verify_switch(switch)
    if num_ranks <= 64:
        verify_flush(build_flush_plan(strategy, home, switch))


def test_local_copies_are_always_taken():
    home, strategy = layout(LLAMA, 8, 2, 2), layout(LLAMA, 8, 2, 1)
    plan = build_switch_plan(home, strategy)
    lacking = 0
    for rank in range(8):
        own = {(s.tensor, s.region) for s in home.shards(rank)}
        lacking += sum(s.region.num_elements for s in strategy.shards(rank) if (s.tensor, s.region) not in own)
    remote = sum(int(m.num_elements[m.source_rank != m.destination_rank].sum()) for m in plan.hops)
    assert remote == lacking > 0


# ---- flushes made wrong on purpose


def flush_of(home_tp, home_pp, tp, pp, *, sp_home, sp, num_ranks=8, model=SMALL):
    home, strategy = layout(model, num_ranks, home_tp, home_pp, sp_home), layout(model, num_ranks, tp, pp, sp)
    return build_flush_plan(strategy, home, build_switch_plan(home, strategy))


def routes_of(plan, name):
    """Mask of the routes that move anything of a tensor (their group's other tensors come along)."""
    tensor = [spec.name for spec in plan.source.tensors].index(name)
    places = plan.cells.start[:-1][plan.cells.tensor == tensor]
    return ((plan.routes.start[:, None] <= places) & (places < plan.routes.stop[:, None])).any(axis=1)


def tampered(plan, keep):
    return dataclasses.replace(plan, routes=plan.routes.select(keep))


def test_oracle_catches_partial_gradients_read_from_one_copy_only():
    plan = flush_of(1, 1, 2, 1, sp_home=None, sp=False)
    verify_flush(plan)
    wrong = routes_of(plan, "decoder.layers.self_attention.q_layernorm.weight") & (plan.routes.source_rank % 2 == 1)
    assert wrong.any()
    with pytest.raises(AssertionError, match="layernorm.*wrong gradient sum"):
        verify_flush(tampered(plan, ~wrong))


def test_oracle_catches_identical_gradients_added_into_one_copy_only():
    plan = flush_of(2, 1, 1, 1, sp_home=False, sp=None)
    verify_flush(plan)
    wrong = routes_of(plan, "decoder.final_layernorm.weight") & (plan.routes.destination_rank % 2 == 1)
    assert wrong.any()
    with pytest.raises(AssertionError, match="copies at home disagree"):
        verify_flush(tampered(plan, ~wrong))


def test_oracle_catches_identical_gradients_read_twice():
    plan = flush_of(1, 1, 2, 1, sp_home=None, sp=False)
    rows = routes_of(plan, "decoder.final_layernorm.weight")
    one = plan.routes.select(np.flatnonzero(rows)[:1])
    twin = dataclasses.replace(one, source_rank=one.source_rank ^ 1)
    with pytest.raises(AssertionError, match="wrong gradient sum"):
        verify_flush(dataclasses.replace(plan, routes=Routes.concatenate([plan.routes, twin])))


def test_oracle_catches_a_tied_gradient_added_to_both_holders():
    plan = flush_of(2, 2, 2, 1, sp_home=True, sp=True)
    verify_flush(plan)
    rows = routes_of(plan, "embedding.word_embeddings.weight") & (plan.routes.destination_side == 1)
    both = dataclasses.replace(plan.routes.select(rows), destination_rank=plan.routes.destination_rank[rows] + 4)
    with pytest.raises(AssertionError, match="must not receive"):
        verify_flush(dataclasses.replace(plan, routes=Routes.concatenate([plan.routes, both])))


def test_oracle_catches_a_missing_and_a_doubled_row_of_a_switch():
    plan = build_switch_plan(layout(SMALL, 8, 2, 2), layout(SMALL, 8, 4, 1))
    with pytest.raises(AssertionError, match="missing"):
        verify_switch(tampered(plan, np.arange(len(plan.routes)) != 3))
    with pytest.raises(AssertionError, match="twice"):
        verify_switch(tampered(plan, np.append(np.arange(len(plan.routes)), 3)))


def test_frozen_tensors_are_never_flushed():
    home, strategy = layout(LLAMA, 4, 2, 2), layout(LLAMA, 4, 1, 2)
    frozen = [
        dataclasses.replace(
            one,
            tensors=tuple(
                dataclasses.replace(t, trainable=not t.name.startswith("embedding") and "fc1" not in t.name)
                for t in one.tensors
            ),
        )
        for one in (home, strategy)
    ]
    switch = build_switch_plan(*frozen)
    verify_switch(switch)
    flush = build_flush_plan(frozen[1], frozen[0], switch)
    verify_flush(flush)
    assert not routes_of(flush, "embedding.word_embeddings.weight").any()
    assert routes_of(flush, "output_layer.weight").any()


# ---- what a user can get wrong


def tiny(regions_of_rank, *, shape=(8,), dtype="float32", name="w", label="a"):
    shards = [
        tuple(
            Shard(tensor=0, region=Region(low=(low,), high=(high,)), parameter="w", storage_offset=0, strides=(1,))
            for low, high in regions
        )
        for regions in regions_of_rank
    ]
    return ShardLayout.from_ranks(
        label=label,
        tensors=[TensorSpec(name=name, shape=shape, dtype=dtype)],
        shards_of_rank=shards,
        dp_rank=[0] * len(shards),
    )


def test_a_region_nobody_holds_is_named():
    with pytest.raises(ValueError, match=r"tensor w: nobody holds region \[6\] to \[8\] in layout a"):
        build_switch_plan(tiny([[(0, 4)], [(4, 6)]]), tiny([[(0, 8)], [(0, 8)]], label="b"))


def test_differing_tensors_are_named():
    whole = [[(0, 8)], [(0, 8)]]
    with pytest.raises(ValueError, match=r"tensor w is not in layout b \(2 missing\)"):
        build_switch_plan(tiny(whole), tiny(whole, name="v", label="b"))
    with pytest.raises(ValueError, match=r"tensor w is float32\[8\].* but float32\[9\]"):
        build_switch_plan(tiny(whole), tiny(whole, shape=(9,), label="b"))
    with pytest.raises(ValueError, match="tensor w is float32.* but bfloat16"):
        build_switch_plan(tiny(whole), tiny(whole, dtype="bfloat16", label="b"))
    with pytest.raises(ValueError, match="has 2 ranks but layout b has 1"):
        build_switch_plan(tiny(whole), tiny(whole[:1], label="b"))
    with pytest.raises(ValueError, match="policy 'fastest' is unknown"):
        build_switch_plan(tiny(whole), tiny(whole), policy="fastest")


def test_a_flush_needs_its_own_switch():
    home, strategy = layout(LLAMA, 4, 2, 2), layout(LLAMA, 4, 1, 2)
    with pytest.raises(ValueError, match="needs the switch plan from"):
        build_flush_plan(home, strategy, build_switch_plan(home, strategy))


def test_a_rank_may_hold_one_region_twice():
    twice = [
        (
            Shard(tensor=0, region=Region(low=(0,), high=(8,)), parameter="in", storage_offset=0, strides=(1,)),
            Shard(
                tensor=0,
                region=Region(low=(0,), high=(8,)),
                parameter="out",
                storage_offset=0,
                strides=(1,),
                stage_copy=1,
            ),
        )
    ] * 2
    strategy = ShardLayout.from_ranks(
        label="b", tensors=[TensorSpec(name="w", shape=(8,), dtype="float32")], shards_of_rank=twice, dp_rank=[0, 1]
    )
    home = tiny([[(0, 4)], [(4, 8)]])
    switch = build_switch_plan(home, strategy)
    verify_switch(switch)
    verify_flush(build_flush_plan(strategy, home, switch))
    back = build_switch_plan(strategy, home)
    verify_switch(back)
    verify_flush(build_flush_plan(home, strategy, back))


def test_gradient_classes_of_the_analytic_layout():
    without, with_sp = layout(SMALL, 4, 2, 1, False), layout(SMALL, 4, 2, 1, True)
    classes = {without.tensors[s.tensor].name: s.gradient_class for s in without.shards(0)}
    assert classes["decoder.final_layernorm.weight"] is GradientClass.IDENTICAL
    assert classes["decoder.layers.self_attention.q_layernorm.weight"] is GradientClass.PARTIAL
    assert all(s.gradient_class is GradientClass.PARTIAL for s in with_sp.shards(0))
