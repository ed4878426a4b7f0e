"""Scripts that must not be touched, under torchrun."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.integrations.megatron_training.conftest import BASE
from tests.integrations.megatron_training.rank import SCRIPT

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
ROOT = pathlib.Path(__file__).parents[3]
TREE = os.environ.get("HOTSPA_MEGATRON_LM")


def torchrun(script, flags, base=BASE):
    pytest.importorskip("megatron.training", reason="comes with the megatron-core wheels from 0.17 on")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
               "-m", "hotspa_plugin.launch", "--cpu", str(script), *base.split(), *flags]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                   "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


FLAGS = ["--tensor-model-parallel-size", "4", "--train-iters", "2", "--mock-data",
         "--hotspa-mock-lengths", "uniform:1-128", "--hotspa-pool", "tp1:32 tp2pp2:64 tp4:128"]  # fmt: skip


def test_the_launcher_hooks_a_script_without_the_import(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT.read_text().replace("import hotspa_plugin.megatron_adaptor", "import os"))
    run = torchrun(script, FLAGS)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count(" hotspa | tp1:32: ") == 2


def test_a_refusal_comes_from_one_rank():
    run = torchrun(SCRIPT, [*FLAGS, "--context-parallel-size", "2"])
    assert run.returncode != 0
    assert (run.stdout + run.stderr).count("error: --context-parallel-size 2 does not go together") == 1


@pytest.mark.skipif(not TREE, reason="set HOTSPA_MEGATRON_LM to a Megatron-LM tree to run its own pretrain_gpt.py")
def test_megatron_lm_s_own_script_runs_unmodified():
    run = torchrun(pathlib.Path(TREE) / "pretrain_gpt.py", FLAGS, base=BASE.replace("--document-samples", ""))
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count(" hotspa | tp1:32: ") == 2
