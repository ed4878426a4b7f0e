"""What many tests of this folder ask of a report, and the small models they run."""

import pytest

from hotspa_plugin.integrations.megatron.verify import verify_case
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase

# Sizes that tp 1, 2, 3, 4 and 6 divide; the MLP is as narrow as that allows.
NARROW = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 12, "ffn_hidden_size": 96}


def mostly_slow(*values, always=1):
    """Parameters of which the first ``always`` are tried always, the others among the slow tests."""
    return [*values[:always], *map(_slow, values[always:])]


def _slow(value):
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=pytest.mark.slow, id=value.id)
    return pytest.param(value, marks=pytest.mark.slow)


def assert_exact(report):
    assert report["exact"], report["problems"]
    assert report["tensor_parallel_copies_identical"] and report["parameters_bit_identical"]
    assert report["sequences_in"] == report["sequences_trained"]
    assert report["num_process_groups_at_end"] == report["num_process_groups_after_start"]


def check(workers, pool, **settings):
    """Verifies one case, which must be exact; returns the report."""
    report = verify_case(workers, VerifyCase(pool=pool, **settings))
    assert_exact(report)
    return report
