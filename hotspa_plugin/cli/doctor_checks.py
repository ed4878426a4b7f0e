"""What ``hotspa doctor`` looks at, one function each."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator

from hotspa_plugin import __version__
from hotspa_plugin.cli.options import RANK_MEMORY_BYTES, available_memory_bytes
from hotspa_plugin.compatibility import TESTED, installed_version, judge

NEEDED = ("torch", "megatron-core")
OPTIONAL = ("transformer-engine", "deepspeed", "transformers", "tokenizers", "numpy", "pydantic")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """``status`` is ok, note (worth knowing) or problem (something will not run)."""

    subject: str
    status: str
    text: str


def examine(*, start_ranks: bool) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    yield Finding(subject="hotspa", status="ok", text=__version__)
    yield from _python()
    yield from _packages()
    yield from _machine()
    yield from _gpus()
    yield from _environment()
    yield from _network()
    if start_ranks and installed_version("torch"):
        yield _two_ranks()


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield _judged("python", version, text=f"{version} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for package in NEEDED:
        version = installed_version(package)
        if version is None:
            text = "not installed: pip install 'hotspa-plugin[megatron]'"
            yield Finding(subject=package, status="problem", text=text)
        else:
            yield _judged(package, version, text=version)
    for package in OPTIONAL:
        version = installed_version(package)
        if version is None:
            yield Finding(subject=package, status="ok", text="not installed (optional)")
        else:
            yield _judged(package, version, text=version)


def _judged(package: str, version: str, *, text: str) -> Finding:
    """``text`` where nothing speaks against the version."""
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if package == "megatron-core" and release >= (0, 17) and sys.version_info < (3, 12):
        text = f"{version}: needs Python 3.12; with this one install megatron-core==0.16.1"
        return Finding(subject=package, status="problem", text=text)
    if package not in TESTED:
        return Finding(subject=package, status="ok", text=text)
    verdict = judge(package, version)
    status = {"tested": "ok", "untested": "note", "refused": "problem"}[verdict.status]
    return Finding(subject=package, status=status, text=verdict.text or text)


def _machine() -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{num_cores} usable, {platform.machine()}, {platform.system()} {platform.release()}"
    yield Finding(subject="cores", status="ok", text=text)
    available_bytes = available_memory_bytes()
    if available_bytes is not None:
        num_ranks = int(available_bytes // RANK_MEMORY_BYTES)
        text = f"{available_bytes / 1e9:.1f} GB available: about {num_ranks} ranks before any model"
        yield Finding(subject="memory", status="ok" if num_ranks >= 4 else "note", text=text)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    text = f"{free_bytes / 1e9:.1f} GB free in {tempfile.gettempdir()}"
    yield Finding(subject="disk", status="ok" if free_bytes > 1e9 else "note", text=text)


def _gpus() -> Iterator[Finding]:
    if not installed_version("torch"):
        return
    try:
        import torch
    except Exception as error:  # a broken installation raises what it likes
        yield Finding(subject="torch", status="problem", text=f"cannot be imported: {type(error).__name__}: {error}")
        return
    if not torch.distributed.is_available():
        yield Finding(subject="torch.distributed", status="problem", text="not in this build of torch: install another")
        return
    if not torch.distributed.is_gloo_available():
        yield Finding(subject="gloo", status="problem", text="not in this build of torch: needed on CPU")
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        names = sorted({torch.cuda.get_device_name(index) for index in range(num_gpus)})
        nccl = "NCCL" if torch.distributed.is_nccl_available() else "no NCCL in this build of torch"
        status = "ok" if torch.distributed.is_nccl_available() else "problem"
        yield Finding(subject="gpus", status=status, text=f"{num_gpus} x {', '.join(names)}, {nccl}")
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            text = "CUDA_DEVICE_MAX_CONNECTIONS=1 lets tensor parallelism overlap on GPUs before Blackwell"
            yield Finding(subject="overlap", status="note", text=text)
    else:
        text = "none: ranks run on the CPU over gloo"
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            text = "nvidia-smi is there, but this torch is built without CUDA: install one with it"
            yield Finding(subject="gpus", status="note", text=text)
        else:
            yield Finding(subject="gpus", status="ok", text=text)
        if installed_version("transformer-engine"):
            text = "transformer-engine needs a GPU: it is not used on the CPU"
            yield Finding(subject="transformer-engine", status="note", text=text)


def _environment() -> Iterator[Finding]:
    if all(name in os.environ for name in RANK_VARIABLES):
        text = f"{', '.join(RANK_VARIABLES)} are set: commands take this process for one of torchrun's ranks"
        yield Finding(subject="environment", status="note", text=text)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads != "1" and not os.path.exists("/dev/nvidiactl"):
        text = f"OMP_NUM_THREADS={threads}: several ranks on few cores are faster with 1"
        yield Finding(subject="threads", status="note", text=text)


def _network() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        text = f"no port can be opened on 127.0.0.1 ({error.strerror}): local ranks cannot meet"
        yield Finding(subject="loopback", status="problem", text=text)


def _two_ranks() -> Finding:
    from hotspa_plugin.runtime.launch import RankFailure, launch

    started_s = time.monotonic()
    saved = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        sums = launch("hotspa_plugin.cli.doctor_checks:add_ranks", 2, device="cpu", timeout_s=60.0, limit_s=120.0)
    except RankFailure as failure:
        return Finding(subject="two ranks", status="problem", text=f"do not work: {failure}")
    finally:
        os.environ.update(saved)
    assert sums == [3, 3]
    return Finding(subject="two ranks", status="ok", text=f"met over gloo in {time.monotonic() - started_s:.1f} s")


def add_ranks(rank: int, world_size: int) -> int:
    """Run on every rank: the sum of 1 to ``world_size``, through an all-reduce."""
    import torch

    total = torch.tensor([rank + 1])
    torch.distributed.all_reduce(total)
    return int(total)
