"""The settings of a process: one frozen object, the only reader of the ``WFBP_*`` variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from wfbp.core.checks import one_of
from wfbp.core.planners import SCHEDULES


@dataclass(frozen=True, slots=True)
class Config:
    """Settings, each with its environment variable: ``WFBP_`` and the field's name in capitals.

    Args:
        schedule: which planner groups gradients, where the program does not say.
        threshold_bytes: group size of the ``threshold`` schedule and of the first steps, and where
            ``dear`` begins its search; as a variable also with a unit, as in ``25M``.
        zero_copy_min_bytes: tensors of at least this size travel from where they lie, without being
            packed; as a variable also with a unit.
        shared_memory: whether ranks of one host may read each other's memory; they do if all may.
        check_launcher: whether to fail where a launcher promised more ranks than MPI found.
        warmup_steps: steps left out of every measurement after a start or a change of plan.
        profile_steps: steps whose compute times are measured, with communication held back.
        trial_steps: steps measured per candidate plan in two rounds of ``auto``. The whole trial
            takes at most 30 times as many.
        replan_threshold: relative change of the iteration time, lasting, that makes ranks measure
            and plan anew; 0 turns that off.
        probe_budget_s: seconds that measuring the network's cost curve may take.
        stall_warning_s: a wait this long is reported, with the ranks that lag.
        timeout_s: a wait this long ends in a ``StallError`` on every rank.
        abort_grace_s: how long a rank that failed lets the others report before it ends the job.
        log_level: of the logger ``wfbp``.
        summary_steps: rank 0 logs one line of each optimizer's stats after so many steps; 0: none.
        record_dir: directory in which every rank records its run, for ``wfbp report``; none if
            empty.
        timeline: directory in which every rank writes a timeline of its steps and operations, for
            Perfetto; none if empty.
        timeline_steps: the first and the last step that the timeline has; as a variable
            ``100-120``.
        exchange_alone: whether PyTorch's optimizers exchange gradients where there is one rank,
            with itself: shows what that costs.
        nvtx: whether profilers are shown what is enqueued on GPUs by name, as NVTX ranges.
        device_operations: whether operations on tensors of GPUs, such as ``allreduce``, go by NCCL
            where they can; else through the host's memory.

    Example:
        >>> Config.from_environment({"WFBP_SCHEDULE": "oasr"}).schedule
        'oasr'
    """

    schedule: str = "auto"
    threshold_bytes: int = 25 * 2**20
    zero_copy_min_bytes: int = 2**18
    shared_memory: bool = True
    check_launcher: bool = True
    warmup_steps: int = 3
    profile_steps: int = 5
    trial_steps: int = 4
    replan_threshold: float = 0.25
    probe_budget_s: float = 2.0
    stall_warning_s: float = 60.0
    timeout_s: float = 600.0
    abort_grace_s: float = 5.0
    log_level: str = "warning"
    summary_steps: int = 0
    record_dir: str = ""
    timeline: str = ""
    timeline_steps: tuple[int, int] = (0, 2**62)
    exchange_alone: bool = False
    nvtx: bool = False
    device_operations: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value, most = getattr(self, name), _MOST.get(name, sys.float_info.max)
            if not least <= value <= most:  # nor is nan
                limits = f"at least {least} and " + (
                    f"at most {most:.0e}" if name in _MOST else "not infinite"
                )
                raise ValueError(f"{name} is {value!r}; expected a number of {limits}")
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("log_level", self.log_level, LOG_LEVELS)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """The settings that the environment asks for.

        Raises:
            ValueError: a variable's value cannot be read; the message names the variable.

        Example:
            >>> Config.from_environment({"WFBP_THRESHOLD_BYTES": "4MiB"}).threshold_bytes
            4194304
        """
        config, unreadable = read_environment(environment)
        if unreadable:
            raise ValueError(unreadable)
        return config


def read_environment(environment: Mapping[str, str] | None = None) -> tuple[Config, str]:
    """The settings that the environment asks for, and what is wrong with those that it garbles.

    Returns:
        The settings, with defaults in place of what cannot be read; and what that is, with the
        remedy, or an empty text.

    Example:
        >>> config, unreadable = read_environment({"WFBP_TIMEOUT_S": "soon"})
        >>> config.timeout_s, unreadable
        (600.0, "WFBP_TIMEOUT_S='soon': expected a number; correct or unset it")
    """
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    problems = []
    for field in fields(Config):
        variable = f"WFBP_{field.name.upper()}"
        text = source.get(variable)
        if text is None:
            continue
        convert, expected = _READERS.get(field.name) or _READERS[type(field.default).__name__]
        try:
            value = convert(text.strip())
        except ValueError:
            problems.append(f"{variable}={text!r}: expected {expected}; {REMEDY}")
            continue
        try:
            Config(**{field.name: value})
        except ValueError as error:
            problems.append(f"{variable}={text!r}: {error}; {REMEDY}")
            continue
        values[field.name] = value
    return Config(**values), "; ".join(problems)


REMEDY = "correct or unset it"
"""What to do about a variable that cannot be read."""


def num_bytes(text: str) -> int:
    """A size as people write it: ``4096``, ``25M``, ``1.5GiB``.

    As usual in shells, K, M and G are powers of 1024, with or without iB, and with B of 1000.

    Raises:
        ValueError: it is none.

    Example:
        >>> num_bytes("25M"), num_bytes("25 MB")
        (26214400, 25000000)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size in bytes")
    number, prefix, unit = match.groups()
    base = 1000 if unit.lower() == "b" else 1024
    return round(float(number) * float(base) ** " kmg".index(prefix.lower() or " "))


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The ``WFBP_*`` variables that are set, by name."""
    source = os.environ if environment is None else environment
    return {name: source[name] for name in sorted(source) if name.startswith("WFBP_")}


def unknown_variables(environment: Mapping[str, str] | None = None) -> str:
    """A warning about ``WFBP_*`` variables that nobody reads; empty where there are none."""
    source = os.environ if environment is None else environment
    known = [f"WFBP_{field.name.upper()}" for field in fields(Config)]
    parts = []
    for name in (n for n in variables(source) if n not in known):
        near = get_close_matches(name, known, 1)
        parts.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"not a setting, and ignored: {', '.join(parts)}" if parts else ""


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"


_SIZE = re.compile(r"(\d+|\d+\.\d+(?=\s*[KMG]))\s*([KMG]?)((?<=[KMG])i?B|)", re.IGNORECASE)

_SIZE_READER = num_bytes, "a size in bytes, such as 4096, 25M, 25MiB or 25MB"


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if int(first) > int(last):
        raise ValueError(text)
    return int(first), int(last)


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "timeline_steps": (_steps, "the first and the last step, such as 100-120"),
    "threshold_bytes": _SIZE_READER,
    "zero_copy_min_bytes": _SIZE_READER,
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "bool": (_switch, "1 or 0"),
}
"""How a variable is read, by field or by the type of its default, and what is expected there."""


LOG_LEVELS = ("debug", "info", "warning", "error")

_LEAST = {
    "threshold_bytes": 1,
    "zero_copy_min_bytes": 1,
    "warmup_steps": 1,
    "profile_steps": 1,
    "trial_steps": 1,
    "replan_threshold": 0,
    "summary_steps": 0,
    "probe_budget_s": 0.0,
    "stall_warning_s": 0.01,
    "timeout_s": 0.01,
    "abort_grace_s": 0.0,
}

_MOST = {"timeout_s": 1e9, "abort_grace_s": 1e9}
"""Thirty years; the operating system's clocks end at ten times that."""
