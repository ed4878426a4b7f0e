"""``hotspa bench train``: stock, static and hot on the same batches, step by step in turn, in one set of processes."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.config import ModelConfig
from hotspa_plugin.cost import ModelSizes
from hotspa_plugin.data import RandomTokenSource, SequenceBatch
from hotspa_plugin.data.assignment import Packing
from hotspa_plugin.integrations.megatron.process import prepare_planned_memory, prepare_process
from hotspa_plugin.runtime.bucket_loop import BatchAssigner
from hotspa_plugin.runtime.memory import PeakMemory, give_back_memory, resident_bytes
from hotspa_plugin.runtime.stopwatch import Stopwatch
from hotspa_plugin.strategy import StrategyPool

if TYPE_CHECKING:
    from hotspa_plugin.integrations.megatron.bench_alone import BucketsAlone

Kind = Literal["stock", "static", "hot", "alone"]
TOKEN_VALUES = 256
WARM_UP_SEQUENCES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train: a pool (of one strategy unless it is hot) and what lays its batches out.

    ``num_rounds`` is given where one is so slow that it takes part in the first rounds only.
    """

    name: str
    kind: Kind
    pool: StrategyPool
    assigner: BatchAssigner | None = None  # None: by the pool's bounds
    packing: Packing = "packed"
    engine: Literal["megatron", "deepspeed"] = "megatron"
    num_rounds: int | None = None

    def takes_part(self, number: int) -> bool:
        return self.num_rounds is None or number <= self.num_rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What all contenders share."""

    model: ModelConfig
    sizes: ModelSizes
    max_positions: int
    seed: int = 1234
    node_of_rank: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One optimizer step of one contender: slowest and fullest rank."""

    step_s: float
    switch_s: float
    flush_s: float
    optimizer_s: float  # with the reduction of gradients
    loss: float
    num_tokens: int
    num_padding_tokens: int
    memory_bytes: int  # the contender's own tensors and everything that the step needed on top


@dataclasses.dataclass(kw_only=True)
class Entered:
    """A contender on this rank."""

    trainer: Any
    stopwatch: Stopwatch


_entered: dict[str, Entered] = {}  # this rank's contenders, kept from call to call


def enter(setup: Setup, contender: Contender, initial: str) -> None:
    """On each rank: builds a contender's trainer. The first leaves its parameters in ``initial``, others load them."""
    prepare_process()
    prepare_planned_memory()  # for all contenders alike
    from hotspa_plugin.integrations.megatron.bench_trainers import deepspeed_trainer, megatron_trainer

    stopwatch = Stopwatch(None if cpu.is_enabled() else torch.cuda.synchronize)
    build = deepspeed_trainer if contender.engine == "deepspeed" else megatron_trainer
    trainer = build(setup, contender, stopwatch)
    if Path(initial).exists():
        trainer.load_parameters(torch.load(initial, weights_only=True))
    else:
        values, _ = trainer.gather_parameters()
        if dist.get_rank() == 0:
            torch.save(values, initial)
    dist.barrier()
    _entered[contender.name] = Entered(trainer=trainer, stopwatch=stopwatch)
    gc.collect()
    gc.freeze()  # so that collecting garbage before every step does not look through all contenders


def entered(name: str) -> Entered:
    return _entered[name]


def random_batch(number: int, lengths: np.ndarray) -> SequenceBatch:
    """Random tokens, the same ones for the same number and lengths."""
    source = RandomTokenSource(lengths, vocab_size=TOKEN_VALUES, seed=number)
    return SequenceBatch(step=number, source=source, indices=np.arange(len(lengths)))


def leave(names: Sequence[str]) -> None:
    """On each rank: forgets contenders."""
    for name in names:
        _entered.pop(name, None)
    gc.unfreeze()


def step(name: str, number: int, lengths: np.ndarray) -> TimedStep:
    """On each rank: one optimizer step of a contender on random tokens of these lengths."""
    from hotspa_plugin.integrations.megatron.bench_trainers import held_bytes_of

    own = entered(name)
    device = torch.device(torch.cuda.current_device())
    batch = random_batch(number, lengths)
    own_bytes = held_bytes_of(own.trainer)
    give_back_memory()
    memory = PeakMemory(device)
    memory.restart()
    before = _held_bytes(device)
    own.stopwatch.start_step()
    dist.barrier()
    started_s = time.perf_counter()
    result = own.trainer.train_step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    phase_s = own.stopwatch.phase_s
    grown = memory.peak_bytes() - before
    mine = [time.perf_counter() - started_s, *(phase_s.get(phase, 0.0) for phase in ("switch", "flush", "optimizer"))]
    most = torch.tensor([*mine, own_bytes + max(0, grown)], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    step_s, switch_s, flush_s, optimizer_s, memory_bytes = most.tolist()
    assignment = result.batch.assignment
    return TimedStep(
        step_s=step_s,
        switch_s=switch_s,
        flush_s=flush_s,
        optimizer_s=optimizer_s,
        loss=result.batch.loss,
        num_tokens=assignment.num_tokens,
        num_padding_tokens=assignment.num_padding_tokens,
        memory_bytes=int(memory_bytes),
    )


def _held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def run_workload(
    workers: Any,
    setup: Setup,
    contenders: Sequence[Contender],
    batches: Sequence[np.ndarray],
    *,
    folder: str,
    memory_limit_bytes: int | None = None,
    alone: BucketsAlone | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> tuple[dict[str, list[TimedStep]], dict[str, str]]:
    """Every contender trains every batch, in turn; the first batch warms up (a few sequences do for those that take
    part in few rounds) and is not kept.

    Returns the timed steps by name, and why contenders were left out: those whose measured memory went over the limit
    in any step. ``workers`` is a ``WorkerPool``. ``alone`` measures the buckets of each hot step by themselves.
    """
    here = __name__
    initial = str(Path(folder) / "initial.pt")
    steps: dict[str, list[TimedStep]] = {}
    refused: dict[str, str] = {}
    slow = {c.name for c in contenders if c.num_rounds is not None}
    rivals = () if alone is None else alone.rivals
    try:
        for contender in (*contenders, *rivals):
            workers.run(f"{here}:enter", setup=setup, contender=contender, initial=initial)
        steps = {contender.name: [] for contender in contenders}
        for number, lengths in enumerate(batches):
            racing = [c.name for c in contenders if c.name not in refused and c.takes_part(number)]
            if not racing:
                break
            tell(f"round {number} of {len(batches) - 1}")
            # each round begins with another one, so that none always follows the same
            racing = racing[number % len(racing) :] + racing[: number % len(racing)]
            for name in racing:
                given = lengths[:WARM_UP_SEQUENCES] if number == 0 and name in slow else lengths
                taken = workers.run(f"{here}:step", name=name, number=number, lengths=given)[0]
                if memory_limit_bytes is not None and taken.memory_bytes > memory_limit_bytes:
                    refused[name] = (
                        f"took {taken.memory_bytes / 1e9:.3f} GB on a rank, over the limit of "
                        f"{memory_limit_bytes / 1e9:.3f}"
                    )
                    workers.run(f"{here}:leave", names=[name])
                elif number:
                    steps[name].append(taken)
            if alone is not None and alone.hot.name not in refused:
                alone.measure(workers, number, lengths, keep=number > 0)
    finally:
        if workers.usable:
            workers.run(f"{here}:leave", names=[*steps, *(rival.name for rival in rivals)])
        Path(initial).unlink(missing_ok=True)
    return {name: taken for name, taken in steps.items() if name not in refused}, refused


def summarize(
    contenders: Sequence[Contender], steps: Mapping[str, Sequence[TimedStep]], refused: Mapping[str, str]
) -> dict[str, Any]:
    """One workload's result as JSON data: runs, and hot over the fastest static and the fastest stock run.

    Ratios are medians over the rounds that both took part in, of the step times on the same batch; ``*_range`` has the
    least and the largest. A range that holds 1 is a tie.
    """
    runs = []
    for contender in contenders:
        taken = steps.get(contender.name)
        if not taken:
            runs.append({"kind": contender.kind, "name": contender.name, "strategy": str(contender.pool),
                         "refused": refused.get(contender.name, "not run")})  # fmt: skip
            continue
        total_s, tokens = sum(t.step_s for t in taken), sum(t.num_tokens for t in taken)
        padding = sum(t.num_padding_tokens for t in taken)
        runs.append(
            {
                "kind": contender.kind,
                "name": contender.name,
                "strategy": str(contender.pool),
                "tokens_per_s": tokens / total_s,
                "step_s": [t.step_s for t in taken],
                "peak_memory_bytes": max(t.memory_bytes for t in taken),
                "padding_fraction": padding / (tokens + padding),
                "exposed_switch_fraction": sum(t.switch_s + t.flush_s for t in taken) / total_s,
                "loss": taken[-1].loss,
            }
        )
    result: dict[str, Any] = {"runs": runs}
    hot = _fastest(runs, "hot")
    for key, kind in (("hot_over_best_static", "static"), ("hot_over_stock", "stock")):
        other = _fastest(runs, kind)
        ratios = [] if hot is None or other is None else [
            o / h for o, h in zip(other["step_s"], hot["step_s"], strict=False)
        ]  # fmt: skip
        result[key] = statistics.median(ratios) if ratios else None
        result[f"{key}_range"] = [min(ratios), max(ratios)] if ratios else None
        result[f"{key}_tie"] = min(ratios) <= 1 <= max(ratios) if ratios else None
    return result


def _fastest(runs: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    found = [run for run in runs if run["kind"] == kind and "tokens_per_s" in run]
    return max(found, key=lambda run: run["tokens_per_s"]) if found else None
