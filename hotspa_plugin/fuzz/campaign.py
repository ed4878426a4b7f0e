"""Many cases one after the other, and those that failed made small."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotspa_plugin.fuzz.case import FuzzCase, Kind, describe
from hotspa_plugin.fuzz.generate import draw_case
from hotspa_plugin.fuzz.outcome import Outcome
from hotspa_plugin.fuzz.runners import Runner, StepRunner, SwitchRunner, timed
from hotspa_plugin.fuzz.shrink import shrink

SWITCHES_PER_STEP = 8  # a switch costs milliseconds, a step of several ranks seconds
RANKS_OF_SWITCHES = 2  # switches by loopback go up to so many times as many ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A case that failed, and the smallest one that fails the same way."""

    outcome: Outcome
    smallest: Outcome


def draw_cases(num_cases: int, seed: int, rank_range: tuple[int, int], kinds: Sequence[Kind]) -> list[FuzzCase]:
    """The cases of a campaign; steps come ordered by their number of ranks, so that ranks start seldom."""
    num_steps = num_cases if "switch" not in kinds else num_cases // (SWITCHES_PER_STEP + 1) if "step" in kinds else 0
    wide = (rank_range[0], rank_range[1] * RANKS_OF_SWITCHES)
    switches = [draw_case("switch", seed, number, wide) for number in range(num_cases - num_steps)]
    steps = [draw_case("step", seed, number, rank_range) for number in range(num_steps)]
    return switches + sorted(steps, key=lambda case: case.num_ranks)


@dataclasses.dataclass(kw_only=True)
class Campaign:
    """Runs ``cases``; every failing one is shrunk for up to ``shrink_s`` seconds (0: not at all).

    ``outcomes`` and ``failures`` hold what there is so far, also where ``run`` was interrupted.
    """

    cases: Sequence[FuzzCase]
    timeout_s: float
    shrink_s: float
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        with SwitchRunner() as switches, StepRunner(timeout_s=self.timeout_s, env=self.env) as steps:
            for case in self.cases:
                runner: Runner = switches if case.kind == "switch" else steps
                outcome = timed(runner, case)
                self.outcomes.append(outcome)
                self.on_outcome(outcome)
                if outcome.is_defect:
                    self.failures.append(Failure(outcome=outcome, smallest=outcome))
                    self.failures[-1] = Failure(outcome=outcome, smallest=self._shrunk(runner, outcome))

    def _shrunk(self, runner: Runner, outcome: Outcome) -> Outcome:
        smallest = outcome

        def still_fails(case: FuzzCase) -> bool:
            nonlocal smallest
            found = timed(runner, case)
            if found.status is not outcome.status:
                return False
            smallest = found
            return True

        if self.shrink_s > 0:
            shrink(outcome.case, still_fails, limit_s=self.shrink_s)
        return smallest


def summary(outcomes: Sequence[Outcome], failures: Sequence[Failure], seconds: float) -> dict[str, Any]:
    """What a campaign saw, JSON-able: counts by outcome and setting, refusals, failures with their replay commands."""
    settings: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        for name, value in describe(outcome.case).items():
            if value is not None:
                settings[name][str(value)] += 1
    return {
        "num_cases": len(outcomes),
        "outcomes": {
            kind: dict(collections.Counter(o.status.value for o in outcomes if o.case.kind == kind))
            for kind in ("switch", "step")
        },
        "seconds": round(seconds, 1),
        "settings": {name: dict(sorted(counts.items())) for name, counts in settings.items()},
        "refusals": sorted({o.detail for o in outcomes if not o.is_defect and o.detail}),
        "failures": [
            {
                "status": failure.outcome.status.value,
                "detail": failure.smallest.detail,
                "replay": failure.smallest.case.replay_command,
                "case": failure.smallest.case.model_dump(mode="json"),
                "found_as": failure.outcome.case.model_dump(mode="json"),
            }
            for failure in failures
        ],
    }
