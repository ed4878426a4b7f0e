"""bf16 parameters with fp32 gradients: what is accumulated, in what, over buckets and micro-batches."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch

from .checks import mostly_slow
from .faults import FAULTS

# Each longer than half its bound, so that each is a micro-batch by itself, alone or not.
LENGTHS = (9, 10, 11, 12, 13, 14, 15, 16, 9, 11, 17, 18, 20, 22, 30, 31, 32, 40, 50, 60)


def compare_with_parts(case, fault=None):
    """Gradient of the batch against the sum over its sequences alone: relative error per tensor; and the dtypes."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault](patch)
        trainer = build_trainer(case)
        dtypes = {p.main_grad.dtype for p in trainer.home.parameters.values()}
        for runner in trainer.loop.runners:
            dtypes |= {p.main_grad.dtype for p in runner.modules.parameters.values()}
        whole = make_batch(case, 0)
        num_targets = trainer.accumulate(whole).num_target_tokens
        together, _ = trainer.gather_gradients()
        parts = None
        for position in range(len(LENGTHS)):
            result = trainer.accumulate(dataclasses.replace(whole, indices=np.array([position])))
            alone, _ = trainer.gather_gradients()
            if dist.get_rank() == 0:
                scaled = {n: g.double() * result.num_target_tokens / num_targets for n, g in alone.items()}
                parts = {n: parts[n] + g for n, g in scaled.items()} if parts else scaled
    if dist.get_rank() != 0:
        return None
    errors = {n: float((together[n].double() - parts[n]).norm() / parts[n].norm()) for n in together}
    return max(errors.values()), dtypes


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", mostly_slow("bf16", "fp32"))
@pytest.mark.parametrize("pool", mostly_slow("tp1:16 tp2:32 tp2pp2:64", "pp2:16 tp4:32 tp1:64"))
def test_gradients_add_up_in_fp32(workers, pool, dtype):
    case = VerifyCase(pool=pool, dtype=dtype, packing="padded", lengths=(LENGTHS,))
    error, dtypes = workers.run(compare_with_parts, case=case)[0]
    assert dtypes == {torch.float32}
    assert error < 1e-5


@pytest.mark.ranks(4)
def test_bf16_sums_would_be_noticed(workers):
    case = VerifyCase(pool="tp1:16 tp2:32 tp2pp2:64", dtype="bf16", packing="padded", lengths=(LENGTHS,))
    error, _ = workers.run(compare_with_parts, case=case, fault="gradients_accumulated_in_bf16")[0]
    assert error > 1e-4
