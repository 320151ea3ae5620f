"""Every error that wfbp raises for the machine and for disagreement between ranks.

A caller's mistake is a ``ValueError`` or ``TypeError``; errors between ranks or in the machine are
subclasses of :class:`WfbpError`. Each message has the rank, what was expected, what was found, and
what to do.
"""

from __future__ import annotations


class WfbpError(RuntimeError):
    """Base of all errors of the runtime."""


class NotInitializedError(WfbpError):
    """A call needs the runtime, before ``wfbp.init()`` or after ``wfbp.shutdown()``."""

    def __init__(self, call: str = "this call") -> None:
        super().__init__(f"{call} needs the runtime: call wfbp.init() first")


class InternalError(WfbpError):
    """An error between ranks or in the machine; Horovod's ``HorovodInternalError``."""


class DisagreementError(InternalError):
    """Ranks submitted tensors or operations that do not match."""


class PeerError(InternalError):
    """Another rank failed or left while this rank still needed it."""


class StallError(InternalError):
    """An operation did not complete within ``WFBP_TIMEOUT_S`` seconds."""


class BackendError(InternalError):
    """MPI or NCCL reported an error; the original is the ``__cause__``."""
