"""Collectives on tensors with Horovod's arguments: those of :mod:`wfbp.torch`, ``average`` and
Adasum.

They are made of the table in ``wfbp.runtime.collectives.forms``; ``collectives.pyi`` declares them.
"""

from __future__ import annotations

from typing import Any

from wfbp.horovod.torch.operands import perform
from wfbp.runtime.collectives.coordinator import Kind
from wfbp.runtime.collectives.forms import FORMS, Form, make_functions
from wfbp.torch import collectives
from wfbp.torch.operands import sparse_allreduce_async


def _parameters(form: Form) -> tuple[tuple[str, Any, str], ...]:
    """Those of :mod:`wfbp.torch`, with ``average`` where Horovod has it."""
    parameters = collectives.parameters(form)
    if form.kind is not Kind.ALLREDUCE:
        return parameters
    op = ("op", None, "Op | HorovodOp | None")
    return (
        ("average", None, "bool | None"),
        *(op if parameter[0] == "op" else parameter for parameter in parameters),
    )


_MEANING = {
    "average": "Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.",
    "op": "``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.",
}

_EXAMPLES = {
    "allreduce": """\
>>> import torch, wfbp.horovod.torch as hvd
>>> hvd.init()
>>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum)  # alike on every rank
tensor([1., 2.])""",
}

__all__ = [*FORMS, "sparse_allreduce_async"]
globals().update(make_functions(__name__, _parameters, perform, "", _EXAMPLES, _MEANING))
