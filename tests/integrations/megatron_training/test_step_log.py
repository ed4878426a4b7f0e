"""The log line under each iteration, and the same figures for TensorBoard and Weights & Biases."""

import pytest

pytest.importorskip("megatron.core")
from hotspa_plugin.integrations.megatron.megatron_training import step_log
from hotspa_plugin.runtime.bucket_loop import BatchResult  # noqa: E402
from hotspa_plugin.runtime.run_record import BucketRecord  # noqa: E402


class Writer:
    """Takes what Megatron's two writers take."""

    def __init__(self):
        self.told = {}

    def add_scalar(self, name, value, iteration):
        self.told[name] = value, iteration

    def log(self, values, iteration):
        for name, value in values.items():
            self.add_scalar(name, value, iteration)


def result(*buckets):
    return BatchResult(loss_sum=1.0, num_target_tokens=1, buckets=buckets, assignment=None)


@pytest.fixture
def log():
    short = {"bound_tokens": 16, "strategy": "tp1"}
    log = step_log.StepLog()
    log.add(result(BucketRecord(**short, sequences=5, tokens=40, compute_s=0.5, switch_s=0.25, flush_s=0.25,
                                switch_bytes_remote=1024, flush_bytes_remote=512)))  # fmt: skip
    log.add(
        result(
            BucketRecord(bound_tokens=128, strategy="tp4", sequences=1, tokens=100, compute_s=2.0),
            BucketRecord(**short, sequences=4, tokens=20, compute_s=0.5, switch_bytes_remote=512),
        )
    )
    return log


def test_the_line_gives_means_per_step_ordered_by_bound(log):
    assert log.line() == (
        " hotspa | tp1:16: 4.5 sequences 30 tokens 0.500 s | tp4:128: 0.5 sequences 50 tokens 1.000 s | "
        "switches: 0.250 s 1 KiB |"
    )
    log.restart()
    assert log.line() == " hotspa | switches: 0.000 s 0 B |"


def test_both_writers_get_the_same_figures(log):
    tensorboard, wandb = Writer(), Writer()
    step_log.write_scalars(log, 7, (tensorboard, wandb))
    assert tensorboard.told == wandb.told
    assert tensorboard.told["hotspa/tp1:16 tokens"] == (30, 7)
    assert tensorboard.told["hotspa/tp4:128 seconds"] == (1.0, 7)
    assert tensorboard.told["hotspa/switch bytes"] == (1024, 7)
    step_log.write_scalars(log, 7, (None, None))
