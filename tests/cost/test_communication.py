import itertools

import pytest

from hotspa_plugin.cost import STAY, CommunicationModel, MemoryModel, StepTime, exposed_reduce_s, published_profile
from hotspa_plugin.strategy import ParallelStrategy

SPECS = ("tp1", "tp2", "tp2pp2", "tp4", "tp4pp2", "tp8")


def resolved(spec, num_ranks):
    return ParallelStrategy.parse(spec).resolve(num_ranks)


@pytest.fixture(scope="module")
def profile():
    return published_profile("llama-7b")


@pytest.fixture(scope="module")
def one_node(profile):
    return CommunicationModel(profile, num_ranks=8)


def test_what_a_rank_lacks_is_a_lower_bound(profile, one_node):
    memory = MemoryModel(profile)
    for home, away in itertools.permutations([resolved(spec, 8) for spec in SPECS], 2):
        least = one_node.least_transition_s(memory.num_parameters(home), memory.num_parameters(away))
        assert least <= one_node.transition(home, away).total_s


def test_bytes_are_those_of_the_plan(one_node):
    # tp8 to tp1 on 8 ranks: everybody lacks all but what it holds; norms are whole everywhere
    h, ffn, layers, vocab = 4096, 11008, 32, 30592
    cut = layers * (4 * h * h + 3 * h * ffn) + 2 * vocab * h
    moved = one_node.transition(resolved("tp8", 8), resolved("tp1", 8))
    assert moved.switch_remote_bytes == 8 * cut * 7 // 8 * 2
    assert moved.flush_remote_bytes >= 2 * moved.switch_remote_bytes
    assert moved.switch_cross_node_bytes == 0


def test_staying_is_free_and_recomputing_moves_nothing(one_node):
    home = resolved("tp4", 8)
    assert one_node.transition(home, home) == STAY
    moved = one_node.transition(home, resolved("tp4rc", 8))
    assert moved.switch_remote_bytes == moved.flush_remote_bytes == 0
    assert 0 < moved.total_s < 0.02  # copies into the slab and back


def test_smaller_gradients_flush_faster(one_node):
    home, away = resolved("tp8", 8), resolved("tp1", 8)
    fp32 = one_node.transition(home, away, gradient_bytes=4)
    bf16 = one_node.transition(home, away, gradient_bytes=2)
    assert fp32.switch_s == bf16.switch_s
    assert bf16.flush_s < 0.6 * fp32.flush_s


def test_crossing_nodes_is_slower(profile, one_node):
    # one rank of four per node: every exchange of a tp4 home crosses
    scattered = CommunicationModel(profile, num_ranks=8, ranks_per_node=2)
    home, away = resolved("tp8", 8), resolved("tp1", 8)
    assert scattered.transition(home, away).total_s > 3 * one_node.transition(home, away).total_s


def test_reductions_ride_the_links_between_their_ranks(profile):
    model = CommunicationModel(profile, num_ranks=16)
    num_parameters = 10**9
    # dp16 with 8 ranks in each node: (4 + 2) bytes a parameter pass 15/16 at the published 44.7 GB/s
    expected_s = 6e9 * 15 / 16 / 44.7e9 + profile.links.latency_s
    assert model.reduce_s(resolved("tp1", 16), num_parameters) == pytest.approx(expected_s)
    # tp8: two ranks, one in each node, at 8.1 GB/s
    expected_s = 6e9 / 2 / 8.1e9 + profile.links.latency_s
    assert model.reduce_s(resolved("tp8", 16), num_parameters) == pytest.approx(expected_s)
    assert model.reduce_s(resolved("tp8pp2", 16), num_parameters) == 0


def test_a_reduction_hides_behind_one_backward():
    assert exposed_reduce_s(1.0, overlaps=False, last_micro_batch_s=9.0) == 1.0
    assert exposed_reduce_s(1.0, overlaps=True, last_micro_batch_s=0.9) == pytest.approx(0.4)
    assert exposed_reduce_s(1.0, overlaps=True, last_micro_batch_s=9.0) == 0.0


def test_step_times_add_up():
    first = StepTime(compute_s=1.0, bubble_s=0.5)
    second = StepTime(switch_s=0.25, flush_s=0.25, reduce_s=1.0, optimizer_s=2.0)
    assert (first + second).total_s == 5.0
    assert ((first + second) / 2).total_s == 2.5
