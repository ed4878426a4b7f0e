"""Runs as they could have been, written through the real recorder's files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from hotspa_plugin.runtime.run_record import (
    BucketRecord,
    ComparedRun,
    Comparison,
    DataInfo,
    LengthHistogram,
    MachineInfo,
    ModelInfo,
    PoolEntry,
    RunInfo,
    StepRecord,
    StepSeconds,
    write_json,
)
from hotspa_plugin.runtime.trace import TraceSampling, part_path

GIB = 2**30
POOLS = {
    2: (("tp1", 512), ("tp2", 4096)),
    3: (("tp1", 4096), ("tp2pp2", 16384), ("tp4pp2", 32768)),
    5: (("tp1", 2048), ("tp2", 4096), ("tp4", 8192), ("tp4pp2", 16384), ("tp8pp2", 32768)),
}


def draw_lengths(count, longest, seed=0):
    source = random.Random(seed)
    return [max(2, min(longest, int(source.lognormvariate(math.log(longest / 45), 1.25)))) for _ in range(count)]


def write_run(directory: Path, *, num_steps=20, num_ranks=4, num_buckets=3, sparse=False, comparison=None, seed=1):
    """``sparse`` leaves out every optional value."""
    source = random.Random(seed)
    pool = POOLS[num_buckets]
    longest = pool[-1][1]
    lengths = draw_lengths(4000, longest, seed)
    directory.mkdir(parents=True, exist_ok=True)
    info = dict(
        world_size=num_ranks,
        home=pool[-1][0],
        started_at="2026-03-01T12:00:00+00:00",
        pool=tuple(PoolEntry(strategy=s, bound_tokens=b) for s, b in pool),
        model=ModelInfo(name="tiny-llama"),
        machine=MachineInfo(host="node-01", device="cpu"),
    )
    if not sparse:
        info.update(
            command="hotspa demo --ranks 4",
            seed=1234,
            model=ModelInfo(name="tiny-llama", num_parameters=12_345_678, dtype="float32", config={"num_layers": 4}),
            machine=MachineInfo(host="node-01", device="cpu", num_cpus=16, memory_bytes=64 * GIB),
            versions={"python": "3.12.3", "torch": "2.14.1", "megatron-core": "0.19.2", "hotspa_plugin": "0.1.0"},
            data=DataInfo(
                source="python standard library",
                num_sequences=len(lengths),
                num_tokens=sum(lengths),
                longest_tokens=max(lengths),
                num_truncated=12,
                lengths=LengthHistogram.from_lengths(lengths),
            ),
        )
    write_json(directory / "run.json", RunInfo(**info))
    sampling, kept = TraceSampling(), []
    with open(directory / "steps.jsonl", "w") as file:
        for step in range(num_steps):
            record, layout = make_step(step, pool, source, sparse)
            file.write(record.model_dump_json(exclude_none=True) + "\n")
            if sampling.keeps(step, num_seen=step, num_kept=len(kept)):
                kept.append((step, layout))
    for rank in range(num_ranks if not sparse else 0):
        write_part(directory, rank, kept, source)
    if comparison:
        write_json(directory / "comparison.json", comparison)
    return directory


def make_step(step, pool, source, sparse):
    """The record, and the spans of rank 0 as (name, args, start and end in seconds, hidden)."""
    batch = draw_lengths(64, pool[-1][1], source.random())
    now, spans, buckets = 0.0, [], []

    def spend(name, seconds, **args):
        nonlocal now
        spans.append((name, args, now, now + seconds, False))
        now += seconds
        return seconds

    seconds = dict.fromkeys(("plan", "data", "switch", "compute", "flush", "optimizer"), 0.0)
    seconds["plan"] += spend("plan", 0.004)
    low, slow = 0, 2.2 if step == 0 else 1.0
    for i, (strategy, bound) in enumerate(pool):
        mine = [n for n in batch if low < n <= bound]
        low = bound
        if not mine:
            continue
        home = i == len(pool) - 1
        tokens = sum(mine)
        moved = 0 if home else int(180e6 / (i + 1))
        args = {"strategy": strategy, "bucket": bound}
        seconds["data"] += spend("data", 0.006 * slow, **args)
        switch = 0 if home else spend("switch", slow * source.uniform(0.05, 0.08), bytes_remote=moved, **args)
        compute = spend("compute", slow * tokens * (7e-6 + 2e-6 * i) * source.uniform(0.96, 1.06), **args)
        flush = 0 if home else spend("flush", slow * source.uniform(0.07, 0.1), bytes_remote=moved, **args)
        if not home:
            spans.append(("flush", args, now, now + 0.05, True))
        seconds["switch"] += switch
        seconds["compute"] += compute
        seconds["flush"] += flush
        buckets.append(
            BucketRecord(
                bound_tokens=bound,
                strategy=strategy,
                sequences=len(mine),
                tokens=tokens,
                padding_tokens=tokens // (9 + i),
                num_micro_batches=1 + len(mine) // 8,
                switch_s=switch,
                compute_s=compute,
                flush_s=flush,
                switch_bytes_local=moved // 3,
                switch_bytes_remote=moved,
                flush_bytes_local=moved // 4,
                flush_bytes_remote=moved,
                peak_memory_bytes=None if sparse else int((2.7 + 0.35 * i) * GIB),
            )
        )
    seconds["optimizer"] += spend("optimizer", 0.045 * slow)
    total = now + 0.01
    optional = (
        {}
        if sparse
        else dict(
            grad_norm=1.2 * math.exp(-step / 40) + source.uniform(0.2, 0.4),
            learning_rate=min(1, (step + 1) / 10) * 3e-4,
            peak_memory_bytes=int(source.uniform(3.9, 4.1) * GIB),
            resident_memory_bytes=int(source.uniform(2.6, 2.7) * GIB),
            hidden_s={"flush": 0.05 * (len(buckets) - 1)},
        )
    )
    loss = 1.9 + 3.7 * math.exp(-step / (60 if step > 100 else 25)) + source.gauss(0, 0.05)
    return StepRecord(
        step=step,
        loss=loss,
        tokens=sum(batch),
        target_tokens=sum(batch) - len(batch),
        sequences=len(batch),
        tokens_per_s=sum(batch) / total,
        seconds=StepSeconds(total=total, **seconds),
        buckets=tuple(buckets),
        **optional,
    ), spans


def write_part(directory, rank, kept, source):
    path = part_path(directory, rank)
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        file.write(
            json.dumps(
                {
                    "rank": rank,
                    "host": f"node-{rank // 8:02d}",
                    "machine": f"m{rank // 8}",
                    "pid": 100 + rank,
                    "wall_ns": 10**18,
                    "monotonic_ns": 0,
                }
            )
            + "\n"
        )
        start = 0
        for step, spans in kept:
            rows = []
            for name, args, begin, end, hidden in spans:
                trim = 0.0 if rank == 0 else (end - begin) * source.uniform(0, 0.12)
                rows.append(
                    [name, start + int(begin * 1e9), start + int((end - trim) * 1e9), int(hidden), int(hidden), args]
                )
            start += int(max(s[3] for s in spans) * 1e9) + 20_000_000
            file.write(json.dumps({"step": step, "spans": rows}) + "\n")


def make_comparison(factor=1.3, noise=0.02, num_steps=10, refused=True, seed=3):
    """Hot ``factor`` times as fast as the best static run, give or take ``noise`` per step."""
    source = random.Random(seed)
    hot_s = [source.uniform(0.9, 1.1) for _ in range(num_steps)]
    losses = [5.5 - 0.1 * i for i in range(num_steps)]

    def run(label, kind, slower):
        seconds = hot_s if kind == "hot" else [s * slower * math.exp(source.gauss(0, noise)) for s in hot_s]
        return ComparedRun(
            label=label,
            kind=kind,
            step_s=tuple(seconds),
            tokens_per_s=50_000 * num_steps / sum(seconds),
            loss=losses[-1],
            losses=tuple(loss * (1 if kind == "hot" else 1 + 2e-7) for loss in losses),
            peak_memory_bytes=4 * GIB,
        )

    runs = [run("hot", "hot", 1), run("tp4pp2", "static", factor), run("tp2pp2", "static", factor * 1.15)]
    if refused:
        runs.append(ComparedRun(label="tp1", kind="static", error="cannot hold its longest sequence: 6.2 GiB of 4 GiB"))
    return Comparison(runs=tuple(runs), num_steps=num_steps, num_tokens=50_000 * num_steps)
