"""Verification that can fail: each of these mistakes, made on purpose in every rank, is noticed."""

import math

import pytest

from hotspa_plugin.integrations.megatron.verify import verify_case
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase

from .checks import assert_exact
from .faults import FAULTS

# Work for every replica of every strategy.
LENGTHS = ((7, 9, 8, 6, 10, 40, 45, 50, 1, 64, 100, 110),)
QK_NORM = {"qk_layernorm": True, "num_layers": 2}
CASES = {
    "partial_added_to_every_copy": [
        {"pool": "tp1:32 tp2:64 tp4:128", "home": "tp2", "model_changes": QK_NORM},
        {"pool": "tp1:32 tp4nosp:64 tp2nosp:128", "model_changes": QK_NORM},
        {"pool": "tp1:32 tp2:128", "model": "tiny-gpt"},
    ],
    "partial_read_from_one_copy": [
        {"pool": "tp2nosp:32 tp4nosp:64 tp1:128", "model_changes": QK_NORM},
        {"pool": "tp2:32 tp1:128", "model": "tiny-gpt"},
    ],
    "identical_added_to_one_copy": [
        {"pool": "tp1:32 tp2nosp:128"},
        {"pool": "tp2:32 tp4nosp:128", "model": "tiny-gpt"},
    ],
    "identical_read_from_every_copy": [{"pool": "tp2nosp:32 tp1:128"}, {"pool": "tp4nosp:32 tp2:128", "home": "tp2"}],
    "tied_added_to_both_holders": [
        {"pool": "tp1:32 pp2:128", "model": "tiny-gpt"},
        {"pool": "pp4:32 tp2pp2:128", "model": "tiny-gpt"},
    ],
    "replica_left_out": [{"pool": "tp1:32 tp4:128"}, {"pool": "tp2:32 pp4:128"}],
    "piece_left_out_of_switch": [{"pool": "tp2:32 tp1:128"}, {"pool": "tp1:32 pp2:64 tp4:128"}],
    "piece_left_out_of_flush": [{"pool": "tp2:32 tp1:128"}, {"pool": "tp1:32 pp2:64 tp4:128"}],
    "flush_skipped": [{"pool": "tp1:32 tp2:64 pp2:128"}],
    "gradients_kept_between_buckets": [{"pool": "tp1:32 tp1rc:64 pp2:128"}],
    "gate_and_up_cut_together": [{"pool": "tp1:32 tp2:128"}, {"pool": "tp4:32 tp1:128"}],
    "padding_trained": [{"pool": "tp1:32 tp2:128"}, {"pool": "tp1:32 pp2:128", "packing": "padded"}],
    "padding_trained_uncounted": [{"pool": "tp1:32 tp2:128"}, {"pool": "tp1:32 pp2:128", "packing": "padded"}],
    "documents_see_each_other": [{"pool": "tp1:32 tp2:128"}, {"pool": "pp2:32 tp1:128", "model": "tiny-gpt"}],
    "positions_run_on": [{"pool": "tp1:32 tp2:128", "model": "tiny-gpt"}],
    "mean_of_means": [{"pool": "tp1:32 tp2:128"}],
    "count_summed_over_replicas": [{"pool": "tp4:32 tp2:128"}, {"pool": "tp1:32 tp1rc:128"}],
    "gradients_accumulated_in_bf16": [{"pool": "tp1:32 tp2:128"}],
}


class FaultyWorkers:
    """A pool of ranks that run with a fault; the reference is as it should be."""

    def __init__(self, workers, fault):
        self.num_ranks, self.run_reference = workers.num_ranks, workers.run_reference
        self._workers, self._fault = workers, fault

    def run(self, target, **kwargs):
        return self._workers.run("tests.integrations.megatron.faults:run_with", fault=self._fault,
                                 target=target, **kwargs)  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        pytest.param(fault, settings, id=f"{fault}-{settings['pool'].replace(' ', '_')}", marks=marks)
        for fault, cases in CASES.items()
        for settings, marks in zip(cases, [(), *[pytest.mark.slow] * len(cases)], strict=False)
    ],
)
def test_fault_is_noticed(workers, fault, settings):
    report = verify_case(FaultyWorkers(workers, fault), VerifyCase(lengths=LENGTHS, **settings))
    assert not report["exact"] and report["problems"]


def test_every_fault_has_a_case():
    assert CASES.keys() == FAULTS.keys()


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_without_the_faults_these_cases_are_exact(workers):
    """So it is the fault that is noticed, and none of them outlives its call."""
    cases = {str(settings): settings for cases in CASES.values() for settings in cases}
    for settings in cases.values():
        assert_exact(verify_case(workers, VerifyCase(lengths=LENGTHS, **settings)))


@pytest.mark.ranks(4)
def test_what_a_switch_leaves_out_is_poisoned(workers):
    """A piece that never arrives is NaN, whatever was in memory before, and the report says which tensor."""
    case = VerifyCase(pool="tp1:32 pp2:64 tp4:128", lengths=LENGTHS)
    report = verify_case(FaultyWorkers(workers, "piece_left_out_of_switch"), case)
    assert math.isnan(report["max_relative_gradient_error"])
    assert not report["parameters_bit_identical"]
