"""Arguments that one rank cannot take, told to the others, who would wait for that rank else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wfbp.errors import PeerError
from wfbp.runtime.runtime import Runtime

_ARGUMENT_ERROR = "refused"


@contextmanager
def sharing_argument_errors(runtime: Runtime, call: str) -> Iterator[None]:
    """Within it a call checks its arguments; what it raises ends the call on every rank.

    The others find out by :func:`check_refusals` on the payloads of the exchange with which the
    call would have begun.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if runtime.size > 1:
            runtime.exchange(json.dumps([_ARGUMENT_ERROR, str(error)]).encode(), call)
        raise


def check_argument_errors(runtime: Runtime, call: str, payloads: Sequence[Sequence[Any]]) -> None:
    """Raise where another rank could not take its arguments.

    Args:
        runtime: of this rank.
        call: the public function, for messages.
        said: what every rank brought to the call's first exchange, decoded.

    Raises:
        PeerError: which rank, and why.
    """
    for rank, payload in enumerate(payloads):
        if payload[0] == _ARGUMENT_ERROR:
            raise PeerError(f"{runtime.where}: {call}: rank {rank}: {payload[1]}")
