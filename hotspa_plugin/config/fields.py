"""Field types that the sections of a configuration share."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic


class Section(pydantic.BaseModel):
    """A part of the configuration: values keep their type, unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def _number_in_text(value: Any) -> Any:
    # YAML 1.1 reads 3e-4 as text, since it lacks a dot; whoever writes it means the number.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


_Real = Annotated[float, pydantic.Field(allow_inf_nan=False), pydantic.BeforeValidator(_number_in_text)]

Count = Annotated[int, pydantic.Field(ge=1)]
CountOrZero = Annotated[int, pydantic.Field(ge=0)]
Positive = Annotated[_Real, pydantic.Field(gt=0)]
NonNegative = Annotated[_Real, pydantic.Field(ge=0)]
Fraction = Annotated[_Real, pydantic.Field(ge=0, lt=1)]
