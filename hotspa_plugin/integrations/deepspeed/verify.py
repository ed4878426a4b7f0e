"""``hotspa verify --engine deepspeed``: the same question, and the same answer, for DeepSpeed's engine."""

from __future__ import annotations

import tempfile
from typing import Any

from hotspa_plugin.integrations.megatron.verify import build_report
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase
from hotspa_plugin.runtime.worker_pool import WorkerPool

_WORKER = "hotspa_plugin.integrations.deepspeed.verify_worker"


def verify_case(workers: WorkerPool, case: VerifyCase, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Runs ``case`` on the pool's ranks and on its one-process reference, and returns what ``hotspa verify`` reports.

    ``case.model`` is a preset, built by Megatron-core, or one of ``verify_worker.HUGGING_FACE_MODELS``. ZeRO's stage
    is ``case.zero_stage`` where it has one (``DeepSpeedVerifyCase``), else 1 with ``distributed_optimizer``, else 0.
    """
    with tempfile.TemporaryDirectory(prefix="hotspa-verify-") as folder:
        ranks = workers.run(f"{_WORKER}:run_ranks", case=case, folder=folder, timeout_s=timeout_s)
        rows = workers.run_reference(
            f"{_WORKER}:run_reference", case=case, pool_world_size=workers.num_ranks, folder=folder, timeout_s=timeout_s
        )
    return build_report(case, ranks[0], rows)
