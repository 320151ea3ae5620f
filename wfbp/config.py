"""The settings of a process: one frozen object, the only reader of the ``WFBP_*`` variables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from wfbp.core.planners import PLANNERS


@dataclass(frozen=True, slots=True)
class Config:
    """Settings, each with its environment variable: ``WFBP_`` and the field's name in capitals.

    Args:
        schedule: which planner groups gradients, where the program does not say.
        threshold_bytes: group size of the ``threshold`` schedule and of the first steps.
        warmup_steps: steps left out of every measurement after a start or a change of plan.
        profile_steps: steps whose compute times are measured, with communication held back.
        trial_steps: steps measured per candidate plan and round of ``auto``, at least.
        trial_s: seconds measured per candidate plan and round, at least: a few short steps tell
            nothing on a machine that is not quiet.
        drift: relative change of the iteration time, lasting, that makes ranks measure and plan
            anew; 0 turns it off.
        probe_s: seconds that measuring the network's cost curve may take.
        stall_warning_s: a wait this long is reported, with the ranks that lag.
        timeout_s: a wait this long ends in a ``StallError`` on every rank.
        abort_grace_s: how long a rank that failed lets the others report before it ends the job.
        log_level: of the logger ``wfbp``.
        run_dir: directory in which every rank records its run, for ``wfbp report``; none if empty.

    Example:
        >>> Config.from_environment({"WFBP_SCHEDULE": "oasr"}).schedule
        'oasr'
    """

    schedule: str = "auto"
    threshold_bytes: int = 25 * 2**20
    warmup_steps: int = 3
    profile_steps: int = 5
    trial_steps: int = 4
    trial_s: float = 0.4
    drift: float = 0.25
    probe_s: float = 2.0
    stall_warning_s: float = 60.0
    timeout_s: float = 600.0
    abort_grace_s: float = 5.0
    log_level: str = "warning"
    run_dir: str = ""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name} is {value!r}; expected a number of at least {least}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; expected one of {SCHEDULES}")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {self.log_level!r}; expected one of {LOG_LEVELS}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """The settings that the environment asks for.

        Raises:
            ValueError: a variable's value cannot be read; the message names the variable.
        """
        source = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = f"WFBP_{field.name.upper()}"
            text = source.get(variable)
            if text is None:
                continue
            convert: Callable[[str], Any] = type(field.default)
            try:
                values[field.name] = convert(text.strip())
                cls(**{field.name: values[field.name]})
            except ValueError as error:
                raise ValueError(
                    f"{variable}={text!r}: expected {convert.__name__} ({error})"
                ) from None
        return cls(**values)


def unknown_variables(environment: Mapping[str, str] | None = None) -> str:
    """A warning about ``WFBP_*`` variables that nobody reads; empty where there are none."""
    source = os.environ if environment is None else environment
    known = [f"WFBP_{field.name.upper()}" for field in fields(Config)]
    parts = []
    for name in sorted(n for n in source if n.startswith("WFBP_") and n not in known):
        near = get_close_matches(name, known, 1)
        parts.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"not a setting, and ignored: {', '.join(parts)}" if parts else ""


SCHEDULES = ("auto", *PLANNERS)

LOG_LEVELS = ("debug", "info", "warning", "error")

_LEAST = {
    "threshold_bytes": 1,
    "warmup_steps": 1,
    "profile_steps": 1,
    "trial_steps": 1,
    "trial_s": 0.0,
    "drift": 0,
    "probe_s": 0.0,
    "stall_warning_s": 0.01,
    "timeout_s": 0.01,
    "abort_grace_s": 0.0,
}
