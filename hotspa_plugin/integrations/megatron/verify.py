"""``hotspa verify``: does hot switching change my numbers?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from typing import Any

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase
from hotspa_plugin.runtime.worker_pool import WorkerPool

FP32_BOUND = 1e-5  # per tensor
BF16_FACTOR = 2.0  # whole gradient, over home's static run of the same batch
_WORKER = "hotspa_plugin.integrations.megatron.verify_worker"


def verify_case(workers: WorkerPool, case: VerifyCase, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Runs ``case`` on the pool's ranks and on its one-process reference; returns what ``hotspa verify`` reports."""
    with tempfile.TemporaryDirectory(prefix="hotspa-verify-") as folder:
        ranks = workers.run(f"{_WORKER}:run_ranks", case=case, folder=folder, timeout_s=timeout_s)
        rows = workers.run_reference(
            f"{_WORKER}:run_reference", case=case, pool_world_size=workers.num_ranks, folder=folder, timeout_s=timeout_s
        )
    return build_report(case, ranks[0], rows)


def build_report(case: VerifyCase, summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on what rank 0 saw (``summary``) and on each step's comparison with the reference (``rows``)."""
    worst = [(error, name) for row in rows for name, error in row["errors"]]
    # NaN compares false with everything: it must come out on top, not be lost.
    worst_error, worst_tensor = max(worst, key=lambda error: _rank_of(error[0]))
    loss_errors = [
        abs(row["loss"] - row["reference_loss"]) / max(abs(row["reference_loss"]), 1e-30)
        if row["target_tokens"]
        else 0.0
        for row in rows
    ]
    report = {
        "max_relative_gradient_error": worst_error,
        "worst_tensor": worst_tensor,
        "tensor_parallel_copies_identical": not summary["tensor_parallel_copies_differing"],
        "max_relative_loss_error": max(loss_errors, key=_rank_of),
        "parameters_bit_identical": summary["parameters_bit_identical"],
        "sequences_in": sum(map(len, case.lengths)),
        "sequences_trained": summary["sequences_trained"],
        "target_tokens": sum(row["target_tokens"] for row in rows),
        "num_process_groups_after_start": summary["num_process_groups_after_start"],
        "num_process_groups_at_end": summary["num_process_groups_at_end"],
    }
    problems = _problems(report, summary, rows)
    if case.dtype == "bf16":
        whole = [row["whole_error"] for row in rows]
        static = [row["static_whole_error"] for row in rows]
        report["whole_gradient_error"] = max(whole, key=_rank_of)
        report["static_whole_gradient_error"] = max(static, key=_rank_of)
        if not sum(whole) <= BF16_FACTOR * sum(static):
            problems.append(
                f"whole-gradient error {sum(whole):.2e} is over {BF16_FACTOR:g} times that of the static run, "
                f"{sum(static):.2e}"
            )
    elif not worst_error <= FP32_BOUND:
        problems.append(f"gradient of {worst_tensor} is off by {worst_error:.2e}, over {FP32_BOUND:g}")
    report["problems"] = problems
    report["exact"] = not problems
    return report


def _problems(report: dict[str, Any], summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    problems = []
    if summary["tensor_parallel_copies_differing"]:
        problems.append(f"copies differ: {', '.join(summary['tensor_parallel_copies_differing'][:5])}")
    if summary["parameters_moved_wrongly"]:
        problems.append(f"parameters arrived changed: {', '.join(summary['parameters_moved_wrongly'][:5])}")
    if report["sequences_in"] != report["sequences_trained"]:
        problems.append(f"{report['sequences_in']} sequences in, {report['sequences_trained']} trained")
    if report["target_tokens"] != (expected := sum(row["reference_target_tokens"] for row in rows)):
        problems.append(f"{report['target_tokens']} target tokens trained, {expected} in the batch")
    if report["num_process_groups_at_end"] != report["num_process_groups_after_start"]:
        problems.append("process groups were made after start")
    return problems


def _rank_of(error: float) -> float:
    """For max(), which may pass over what is not a number."""
    return math.inf if math.isnan(error) else error
