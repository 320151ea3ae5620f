"""Settings that must be the same on every rank, compared once, when ranks meet.

Phases of the tuner end after a number of steps, and a measurement of the network repeats as often
as its budget allows: ranks whose numbers differ would call different collectives.
"""

from __future__ import annotations

import json
from typing import Any

from wfbp.errors import DisagreementError
from wfbp.runtime.runtime import Runtime

SHARED = ("warmup_steps", "profile_steps", "trial_steps", "trial_s", "drift", "probe_s")
"""Fields of ``Config``. The schedule and its threshold are compared per optimizer."""


def agree_on_settings(runtime: Runtime) -> None:
    """Compare the shared settings of all ranks; collective.

    Raises:
        DisagreementError: on every rank; which settings differ, and who has what.
    """
    mine = {name: getattr(runtime.config, name) for name in SHARED}
    payloads = runtime.exchange(json.dumps(mine).encode(), "init(): comparing settings")
    said = [json.loads(payload) for payload in payloads]
    differing = [name for name in SHARED if any(s[name] != said[0][name] for s in said)]
    if differing:
        shown = ", ".join(_shown(name, [s[name] for s in said]) for name in differing)
        raise DisagreementError(
            f"{runtime.where}: init(): ranks disagree on {shown}. Set it to the same value on "
            "every rank; mpirun passes variables on to all of them"
        )


def _shown(name: str, values: list[Any]) -> str:
    """The setting's variable, and which ranks have which value."""
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {value}"
        for value, ranks in holders.items()
    ]
    return f"WFBP_{name.upper()} ({'; '.join(parts)})"
