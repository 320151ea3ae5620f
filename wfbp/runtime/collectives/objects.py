"""Python objects from rank to rank: anything that cloudpickle can pickle."""

from __future__ import annotations

import pickle
from itertools import accumulate
from typing import Any

import cloudpickle
import numpy as np

from wfbp.runtime.collectives.api import current
from wfbp.runtime.collectives.operations import Call
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.collectives.request import Kind
from wfbp.runtime.collectives.submission import Outcome


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, on every rank.

    Args:
        obj: anything that can be pickled, also functions of the program; looked at on the root.
        root_rank: whose object everybody gets.
        name: by which ranks find each other's operations; those without one follow one another.
        process_set: the ranks that take part.

    Returns:
        On the root the object itself, elsewhere a copy.

    Raises:
        ValueError: no such rank, or a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    number = process_set.known_id("broadcast_object()")
    operations = current("broadcast_object()")
    is_root = operations.rank == root_rank
    payload = cloudpickle.dumps(obj) if is_root else b""
    parts = _gather("broadcast_object", name, number, payload, root_rank)
    return obj if is_root else pickle.loads(b"".join(parts))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order.

    Args:
        obj: anything that can be pickled, also functions of the program.
        name: by which ranks find each other's operations; those without one follow one another.
        process_set: the ranks that take part.

    Raises:
        ValueError: a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.allgather_object("me") == ["me"] * wfbp.size()
        True
    """
    number = process_set.known_id("allgather_object()")
    payloads = _gather("allgather_object", name, number, cloudpickle.dumps(obj))
    return [pickle.loads(payload) for payload in payloads]


def _gather(
    function: str, name: str | None, process_set: int, payload: bytes, root: int | None = None
) -> list[bytes]:
    """Every rank's bytes; function and root, if there is one, are compared."""
    operations = current(f"{function}()")

    def split(outcome: Outcome) -> list[bytes]:
        ends = list(accumulate(outcome.rows))
        return [
            outcome.data[end - rows : end].tobytes()
            for rows, end in zip(outcome.rows, ends, strict=True)
        ]

    details: dict[str, Any] = {"dtype": "uint8", "shape": (len(payload),)}
    details["called"] = f"{function} {name!r}" if name else function
    if root is not None:
        details["root"] = root
    data = np.frombuffer(payload, np.uint8)
    label = f"{name}.object" if name else None
    call = Call(Kind.ALLGATHER, label, process_set, data, split, details)
    return operations.run(call)
