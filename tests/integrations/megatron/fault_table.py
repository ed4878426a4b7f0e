"""Every fault in every phase of ``hotspa train`` on 4 ranks: how it ends, how soon, and what is said.

python -m tests.integrations.megatron.fault_table --out docs/benchmarks/faults.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.integrations.megatron.fault_run import PHASES

KINDS = {"kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)", "slow": "slow (3 timeouts)"}
TIMEOUT_S = 10.0
SLOW_S = 3 * TIMEOUT_S
GRACE_S = 10.0  # to notice, settle and end processes on a busy machine
SETTLE_S = 2.0  # for processes that end by themselves once nobody needs them
NUM_RANKS, RANK, STEP, NUM_STEPS = 4, 2, 3, 6
POOL = "tp1:32 tp2:64 tp2pp2:256"
CONFIG = f"""
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 32}}
pool: POOL
data: {{source: folder, path: data, global_batch_sequences: 12}}
optimizer: {{decay_steps: {NUM_STEPS}}}
run: {{steps: {NUM_STEPS}, save_every: 2, timeout_s: {TIMEOUT_S}, device: cpu, out: OUT}}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended: ``seconds`` after the fault, the last lines of stderr, and what was left behind."""

    exit_code: int
    seconds: float
    message: str
    processes_left: int
    checkpoint: str | None


def prepare(folder: Path) -> None:
    """Texts of many lengths, the same in every run."""
    (folder / "data").mkdir()
    for index in range(40):
        length = (9, 30, 50, 64, 120, 200, 17)[index % 7] + index % 5
        (folder / "data" / f"{index:02}.txt").write_text(("hot switching " * 20)[: min(length, 250)])


def start(folder: Path, out: str, arguments: list[str], module: list[str], pool: str = POOL) -> subprocess.Popen:
    (folder / f"{out}.yaml").write_text(CONFIG.replace("POOL", pool).replace("OUT", out))
    command = [sys.executable, "-m", *module, "train", f"{out}.yaml", "--ranks", str(NUM_RANKS), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(folder: Path, out: str, *arguments: str, pool: str = POOL) -> list[float]:
    """Losses of an undisturbed run, or of a resumed one with those before it."""
    process = start(folder, out, list(arguments), ["hotspa_plugin"], pool)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return losses(folder / out)


def losses(out: Path) -> list[float]:
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    last = {step["step"]: step["loss"] for step in steps}  # a resumed run repeats steps after its checkpoint
    return [last[step] for step in sorted(last)]


def train_with_fault(folder: Path, out: str, kind: str, phase: str, *, slow_s: float = SLOW_S) -> Ending:
    struck = folder / f"{out}.struck"
    fault = {"kind": kind, "phase": phase, "rank": RANK, "step": STEP, "struck": str(struck), "slow_s": slow_s}
    process = start(folder, out, [], ["tests.integrations.megatron.fault_run", json.dumps(fault)])
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        ended_s = time.time()
        # Python's resource tracker ends by itself when the process that it served has ended, a moment later.
        while (left := processes_of_session(process.pid)) and time.time() < ended_s + SETTLE_S:
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
    assert struck.exists(), f"the fault never struck, exit code {process.returncode}: {errors}"
    pointer = folder / out / "checkpoints" / "latest"
    return Ending(
        exit_code=process.returncode,
        seconds=ended_s - float(struck.read_text()),
        message=errors.strip(),
        processes_left=left,
        checkpoint=pointer.read_text() if pointer.exists() else None,
    )


def processes_of_session(leader: int) -> int:
    """Live processes of a session; ranks have groups of their own but stay in it."""
    found = 0
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        found += bool(fields) and int(fields[3]) == leader and fields[0] != "Z"
    return found


def check(ending: Ending, kind: str, phase: str) -> None:
    """What must hold of every ending; raises AssertionError with the message that was printed."""
    assert ending.exit_code == 1, ending
    assert ending.seconds <= TIMEOUT_S + GRACE_S, ending
    assert ending.processes_left == 0, ending
    first = ending.message.splitlines()[0]
    assert f"rank {RANK}: " in first, ending.message
    assert kind != "kill" or "SIGKILL" in first, ending.message
    awaited = PHASES[phase].format(step=STEP)
    assert awaited in first, ending.message
    if phase != "start":
        assert f"step {STEP}, " in first, ending.message
    assert ending.checkpoint == (None if phase == "start" else "step-00000002"), ending


def example(message: str) -> str:
    """The first line, and what the other ranks said."""
    lines = [line for line in message.splitlines() if re.match(r"rank", line)]
    # Paths and line numbers of this machine say nothing elsewhere.
    return "\n".join("    " + re.sub(r', at File "[^"]*", line \d+ in \w+', "", line) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="JSON; what is in it is not run again")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--phases", nargs="*", default=list(PHASES))
    chosen = parser.parse_args()
    results = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    wanted = [(k, p) for k in chosen.kinds for p in chosen.phases if k not in results.get(p, {})]
    with tempfile.TemporaryDirectory(prefix="hotspa-faults-") as name, ThreadPoolExecutor(chosen.jobs) as pool:
        folder = Path(name)
        prepare(folder)

        def run(fault: tuple[str, str]) -> tuple[str, str, Ending]:
            kind, phase = fault
            return kind, phase, train_with_fault(folder, f"{kind}-{phase.replace(' ', '-')}", kind, phase)

        num_wrong = 0
        for running in as_completed([pool.submit(run, fault) for fault in wanted]):
            try:
                kind, phase, ending = running.result()
                print(f"{kind} {phase}: {ending.seconds:.1f} s\n{example(ending.message)}", flush=True)
                check(ending, kind, phase)
            except AssertionError as error:
                num_wrong += 1
                print(f"WRONG: {error}", flush=True)
                continue
            results.setdefault(phase, {})[kind] = {"seconds": round(ending.seconds, 1), "message": ending.message}
            chosen.results.write_text(json.dumps(results, indent=1))
    if num_wrong:
        sys.exit(f"{num_wrong} of {len(wanted)} runs did not end as they must")
    if chosen.out:
        chosen.out.write_text(page(results))


def page(results: dict) -> str:
    """The page; kinds that have not been run in every phase are left out."""
    kinds = [kind for kind in KINDS if all(kind in results.get(phase, {}) for phase in PHASES)]
    examples = [example(results["flush"][kind]["message"]) for kind in kinds]
    rows = [
        " | ".join([f"| {phase}", *(f"{results[phase][kind]['seconds']:.1f}" for kind in kinds)]) + " |"
        for phase in PHASES
    ]
    return f"""# Faults

What befalls one of {NUM_RANKS} ranks of `hotspa train` (gloo, CPU, pool `{POOL}`,
`run.timeout_s: {TIMEOUT_S:g}`) as it enters a phase of step {STEP}, and the seconds until the command has ended, with
all its processes:

| phase | {" | ".join(KINDS[kind] for kind in kinds)} |
| --- |{" ---: |" * len(kinds)}
{chr(10).join(rows)}

Exit code 1 each time. The last good checkpoint stays in force: one that is being written counts when it is whole. The
message begins with the rank at fault and names step, phase, bucket and strategy, then what happened to the others:

{(chr(10) * 2).join(examples)}

Made by `python -m tests.integrations.megatron.fault_table`; `tests/integrations/megatron/test_broken_runs.py` tries
some of them, and resumes such runs.
"""


if __name__ == "__main__":
    main()
