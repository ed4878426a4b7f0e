"""The balance heuristics against exact answers by an integer program, and their own guarantees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hotspa_plugin.cost.micro_batch import MicroBatchCost, pipeline_s
from hotspa_plugin.data.balancing import balance_packed, balance_padded, best_fit_decreasing, longest_first


def exact_packed_s(lengths, num_replicas, capacity_tokens, cost):
    """Least possible time of the slowest replica, one stage: x[i,r,k] item in bin, y[r,k] bin used, t."""
    num_items, num_bins = len(lengths), min(len(lengths), -(-2 * sum(lengths) // capacity_tokens) + 1)
    shape = (num_items, num_replicas, num_bins)
    num_x, num_y = int(np.prod(shape)), num_replicas * num_bins
    index = np.arange(num_x).reshape(shape)
    rows, low, high = [], [], []

    def row(entries, lower, upper):
        values = np.zeros(num_x + num_y + 1)
        for place, value in entries:
            values[place] = value
        rows.append(values)
        low.append(lower)
        high.append(upper)

    items_s = cost.sequences_s(lengths)
    for i in range(num_items):
        row([(p, 1.0) for p in index[i].ravel()], 1, 1)
    for r in range(num_replicas):
        entries = [(num_x + num_y, -1.0)]
        for k in range(num_bins):
            used = num_x + r * num_bins + k
            row(
                [(index[i, r, k], float(lengths[i])) for i in range(num_items)] + [(used, -capacity_tokens)], -np.inf, 0
            )
            entries += [(index[i, r, k], items_s[i]) for i in range(num_items)] + [(used, cost.c_s)]
        row(entries, -np.inf, 0)
    objective = np.zeros(num_x + num_y + 1)
    objective[-1] = 1
    solved = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(num_x + num_y), 0),
        bounds=Bounds(0, np.append(np.ones(num_x + num_y), np.inf)),
        options={"mip_rel_gap": 1e-4, "time_limit": 20},
    )
    assert solved.status == 0
    return solved.fun


def slowest_packed_s(grouping, lengths, cost, num_stages=1):
    return max(pipeline_s([cost.packed_s(lengths[m]) for m in replica], num_stages) for replica in grouping)


def test_packed_is_near_the_optimum_on_small_cases():
    generator = np.random.RandomState(5)
    ratios = []
    for num_items, num_replicas, constant in [(7, 2, 0.0), (8, 3, 0.0), (7, 2, 30.0), (8, 2, 100.0), (6, 3, 50.0)] * 2:
        lengths = generator.randint(10, 100, num_items)
        cost = MicroBatchCost(a_s_per_token2=0.02, b_s_per_token=1.0, c_s=constant)
        found = slowest_packed_s(
            balance_packed(lengths, num_replicas=num_replicas, num_stages=1, capacity_tokens=120, cost=cost),
            lengths,
            cost,
        )
        ratios.append(found / exact_packed_s(lengths, num_replicas, 120, cost))
    assert min(ratios) > 1 - 1e-3  # nobody beats the optimum: the checker itself is right
    assert max(ratios) < 1.15 and np.mean(ratios) < 1.03, ratios


@pytest.mark.parametrize("num_stages", [1, 4])
def test_large_batches_are_balanced(num_stages):
    lengths = np.minimum(np.random.RandomState(0).lognormal(6, 1.3, 512).astype(np.int64) + 1, 16384)
    cost = MicroBatchCost(a_s_per_token2=2e-9, b_s_per_token=1e-4, c_s=0.02)
    packed = balance_packed(lengths, num_replicas=4, num_stages=num_stages, capacity_tokens=16384, cost=cost)
    times = [pipeline_s([cost.packed_s(lengths[m]) for m in replica], num_stages) for replica in packed]
    assert max(times) < (1.02 if num_stages == 1 else 1.1) * np.mean(times)
    counts = [len(replica) for replica in packed]
    assert max(counts) - min(counts) <= max(1, max(counts) // 2)
    padded = balance_padded(lengths, num_replicas=4, num_stages=num_stages, capacity_tokens=16384, cost=cost)
    times = [pipeline_s([cost.padded_s(len(m), lengths[m].max()) for m in replica], num_stages) for replica in padded]
    assert max(times) < 1.25 * np.mean(times)
    slots = sum(len(m) * lengths[m].max() for replica in padded for m in replica)
    assert slots < 1.15 * lengths.sum()


@settings(max_examples=200, deadline=None)
@given(items=st.lists(st.integers(1, 50), max_size=60), capacity=st.integers(50, 120))
def test_best_fit_decreasing_keeps_its_guarantee(items, capacity):
    bins = best_fit_decreasing(range(len(items)), items, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(items)))
    assert all(sum(items[i] for i in b) <= capacity for b in bins)
    # never two bins that would fit into one another's room: at most twice the volume bound
    assert len(bins) <= max(1, 2 * -(-sum(items) // capacity)) or not items


@settings(max_examples=200, deadline=None)
@given(items=st.lists(st.integers(1, 1000), min_size=1, max_size=60), num_parts=st.integers(1, 9))
def test_longest_first_keeps_its_guarantee(items, num_parts):
    """Graham: at most 4/3 - 1/(3m) of the optimum, here against the optimum's lower bound where that is enough."""
    parts = longest_first(items, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(items)))
    largest = max(sum(items[i] for i in part) for part in parts)
    assert largest <= sum(items) / num_parts + max(items) * (1 - 1 / num_parts) + 1e-9


def test_items_without_cost_are_spread_too():
    assert sorted(map(len, longest_first([0.0] * 10, 5))) == [2] * 5
