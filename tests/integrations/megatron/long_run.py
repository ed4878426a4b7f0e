"""Thousands of steps of ``hotspa train`` with switching: what must stay flat.

python -m tests.integrations.megatron.long_run --steps 2000 --ranks 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import threading
from pathlib import Path

from hotspa_plugin.config import read_config
from hotspa_plugin.runtime.launch import launch

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 32}
pool: tp1:32 tp2:64 pp2:128
data: {source: folder, path: data, global_batch_sequences: 4}
run: {device: cpu, out: out, save_every: 250, timeout_s: 120}
"""
NUM_SAMPLES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What one rank held after a step."""

    step: int
    step_s: float  # median since the sample before
    resident_bytes: int
    open_files: int
    threads: int
    children: int
    process_groups: int
    shared_memory_files: int


def train_and_sample(rank: int, world_size: int, config) -> list[Sample]:
    """Trains like ``hotspa train`` and samples this rank on the way."""
    from hotspa_plugin.integrations.megatron.process import prepare_process

    prepare_process()
    from hotspa_plugin.integrations.megatron import train_loop, training_run
    from hotspa_plugin.process_groups.registry import num_live_groups
    from hotspa_plugin.runtime.memory import resident_bytes

    every = config.run.steps // NUM_SAMPLES
    samples: list[Sample] = []
    seconds: list[float] = []
    original = train_loop.TrainLoop._record

    def record(self, step, *rest):
        made = original(self, step, *rest)
        seconds.append(rest[-1])
        if (step + 1) % every == 0:
            samples.append(
                Sample(
                    step=step + 1,
                    step_s=statistics.median(seconds),
                    resident_bytes=resident_bytes(),
                    open_files=len(os.listdir("/proc/self/fd")),
                    threads=threading.active_count(),
                    children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
                    process_groups=num_live_groups(),
                    shared_memory_files=len(os.listdir("/dev/shm")),
                )
            )
            seconds.clear()
        return made

    train_loop.TrainLoop._record = record
    try:
        training_run.train_rank(rank, world_size, config)
    finally:
        train_loop.TrainLoop._record = original
    return samples


def run(folder: Path, num_steps: int, num_ranks: int) -> tuple[list[list[Sample]], dict[str, int]]:
    """Samples of every rank, and bytes by name of what lies in the run folder."""
    (folder / "data").mkdir()
    for index in range(12):
        (folder / "data" / f"{index:02}.txt").write_text("hot switching " * (1 + index % 9))
    (folder / "config.yaml").write_text(CONFIG)
    out, data = folder / "out", folder / "data"
    config = read_config(folder / "config.yaml", {"run.steps": num_steps, "run.out": str(out), "data.path": str(data)})
    samples = launch(train_and_sample, num_ranks, (config,), device="cpu", timeout_s=120, limit_s=3600)
    sizes = {str(entry.relative_to(out)): entry.stat().st_size for entry in sorted(out.rglob("*")) if entry.is_file()}
    return samples, sizes


def check(samples: list[list[Sample]], sizes: dict[str, int], num_steps: int) -> None:
    """Nothing grows after the first quarter; records grow by lines of steps alone."""
    for of_rank in samples:
        settled = of_rank[len(of_rank) // 4 :]
        for name in ("open_files", "threads", "children", "process_groups"):
            values = {getattr(sample, name) for sample in settled}
            assert len(values) == 1, (name, values)
        assert max(s.resident_bytes for s in settled) - settled[0].resident_bytes < 6 << 20, settled
        # Halves, since single samples of a shared machine mean little.
        half = len(settled) // 2
        early, late = (statistics.median(s.step_s for s in part) for part in (settled[:half], settled[half:]))
        assert late < 1.5 * early, (early, late)
    assert sizes["steps.jsonl"] < 3000 * num_steps, sizes
    traces = sum(size for name, size in sizes.items() if "trace" in name)
    assert traces < 40 << 20, sizes  # record.trace_limit steps at most
    assert sum("rank-" in name for name in sizes) <= len(samples) * -(-num_steps // 250), sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotspa-long-") as folder:
        samples, sizes = run(Path(folder), chosen.steps, chosen.ranks)
    if chosen.json:
        told = {"samples": [[dataclasses.asdict(s) for s in of_rank] for of_rank in samples], "bytes": sizes}
        chosen.json.write_text(json.dumps(told, indent=1))
    for sample in samples[0]:
        print(sample)
    print(sizes)
    check(samples, sizes, chosen.steps)


if __name__ == "__main__":
    main()
