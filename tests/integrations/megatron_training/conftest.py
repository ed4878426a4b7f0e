"""Ranks that stay alive over all tests here, and a data set of documents with a heavy tail."""

import dataclasses
import importlib.util
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest

from hotspa_plugin.data.indexed_dataset import HEADER, MAGIC

NUM_RANKS = 4
LONGEST = 128
BASE = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 96 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --max-position-embeddings 128 --seq-length 128 --micro-batch-size 4 --global-batch-size 16
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-iters 2 --weight-decay 0.1
    --clip-grad 0.5
    --tokenizer-type NullTokenizer --vocab-size 250 --make-vocab-size-divisible-by 16 --document-samples
    --calculate-per-token-loss --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --attention-backend unfused --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion
    --no-create-attention-mask-in-dataloader --num-workers 0 --log-interval 1 --logging-level 40
    --eval-iters 0 --eval-interval 1000
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run gave."""

    code: int
    losses: list
    grad_norms: list
    copies: list
    validation: list
    output: str
    errors: str
    folder: Path

    def gradients(self):
        import torch

        return torch.load(self.folder / "gradients.pt")

    def parameters(self):
        import torch

        return torch.load(self.folder / "parameters.pt")

    def first(self, iterations: int):
        """As if the run had ended after ``iterations``."""
        return dataclasses.replace(self, losses=self.losses[:iterations], grad_norms=self.grad_norms[:iterations])


def write_documents(prefix: Path, documents: list) -> None:
    lengths = np.array([len(d) for d in documents], dtype="<i4")
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * 2
    bounds = np.arange(len(documents) + 1, dtype="<i8")
    prefix.with_suffix(".bin").write_bytes(b"".join(np.asarray(d, dtype="<u2").tobytes() for d in documents))
    header = MAGIC + HEADER.pack(1, 8, len(documents), len(bounds))
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + bounds.tobytes())
    assert struct.calcsize("<QBQQ") == HEADER.size


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """Prefix of a data set of 200 documents of 1 to 128 tokens, most of them short."""
    random = np.random.RandomState(7)
    lengths = np.clip(random.lognormal(2.7, 1.1, 200), 1, LONGEST).astype(int)
    lengths[:3] = [1, LONGEST, 2]
    prefix = tmp_path_factory.mktemp("documents") / "documents"
    write_documents(prefix, [random.randint(0, 250, length) for length in lengths])
    return prefix


@pytest.fixture(scope="session")
def ranks():
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron.training comes with the megatron-core wheels from 0.17 on, for Python 3.12")
    from hotspa_plugin.runtime.worker_pool import WorkerPool

    with WorkerPool(NUM_RANKS, device="cpu", env={"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}) as pool:
        yield pool


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """File of the parameters that all compared runs start from; the first run writes it."""
    return tmp_path_factory.mktemp("start")


@pytest.fixture
def pretrain(ranks, documents, start, tmp_path_factory):
    """Runs the example script on all ranks: ``pretrain("--tensor-model-parallel-size 4", iterations=20)``."""
    return _runner(ranks, documents, start, tmp_path_factory)


@pytest.fixture(scope="module")
def pretrain_once(ranks, documents, start, tmp_path_factory):
    """The same, for fixtures of a module."""
    return _runner(ranks, documents, start, tmp_path_factory)


def _runner(ranks, documents, start, tmp_path_factory):
    def run(
        flags: str, *, iterations: int = 3, model: str = "default", fault: str | None = None, base: str = BASE, **more
    ):
        folder = tmp_path_factory.mktemp("run")
        data = [] if "--mock-data" in flags else ["--data-path", str(documents)]
        argv = [*base.split(), *data, "--split", "100,0,0", "--train-iters", str(iterations), *shlex.split(flags)]
        results = ranks.run(
            "tests.integrations.megatron_training.rank:pretrain",
            argv=argv, folder=str(folder), start=str(start / f"{model}.pt") if model else None, fault=fault, **more,
        )  # fmt: skip
        # Log lines come from the last rank, everything else from the first.
        first, last = results[0], results[-1]
        return Result(**{**first, "output": first["output"] + last["output"]}, folder=folder)

    return run
