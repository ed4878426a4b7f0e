"""What became of a case, and whether that is a defect."""

from __future__ import annotations

import dataclasses
import enum
import re

from hotspa_plugin.fuzz.case import FuzzCase, may_lack_memory, misfit

MAX_MESSAGE = 600  # characters of a refusal


class Status(enum.Enum):
    """How a case ended; all but the first two are defects."""

    VERIFIED = "verified"
    REFUSED = "refused at start"
    WRONG = "wrong numbers"
    CRASHED = "crashed"
    HUNG = "hung"
    LATE = "failed late"
    UNCLEAR = "refused unclearly"
    TOO_STRICT = "refused though it fits"
    TOO_LAX = "accepted though it does not fit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """``detail`` is the refusal, the first wrong tensor, or the error; ``seconds`` what the case took."""

    case: FuzzCase
    status: Status
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_defect(self) -> bool:
        return self.status not in (Status.VERIFIED, Status.REFUSED)


def verified(case: FuzzCase) -> Outcome:
    """All numbers were right; still a defect where the case should never have started."""
    why = misfit(case)
    if why is not None:
        return Outcome(case=case, status=Status.TOO_LAX, detail=why)
    return Outcome(case=case, status=Status.VERIFIED)


def refused(case: FuzzCase, message: str) -> Outcome:
    """Refused before anything moved; a defect where the case fits, or the message is not one clear line."""
    if not message.strip() or len(message) > MAX_MESSAGE or "\n" in message.strip() or "Traceback" in message:
        return Outcome(case=case, status=Status.UNCLEAR, detail=message)
    expected = misfit(case) is not None or (may_lack_memory(case) and re.search("memory budget of .* bytes", message))
    return Outcome(case=case, status=Status.REFUSED if expected else Status.TOO_STRICT, detail=message)
