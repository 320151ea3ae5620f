"""Collectives on tensors, under Horovod's names and with its arguments.

They are made of the table in ``wfbp.runtime.collectives.forms``; ``collectives.pyi`` declares them.
"""

from __future__ import annotations

from typing import Any

from wfbp.runtime.collectives import forms
from wfbp.runtime.collectives.coordinator import Kind
from wfbp.runtime.collectives.forms import NAME, PROCESS_SET, ROOT, SPLITS, Form
from wfbp.torch.compression import Compression
from wfbp.torch.operands import perform, sparse_allreduce_async


def parameters(form: Form) -> tuple[tuple[str, Any, str], ...]:
    """Name, default and type of each parameter after the tensor."""
    may_compress = form.waits and not form.in_place
    packed = (("compression", Compression.none, "type[Compressor]"),) * may_compress
    if form.kind is Kind.ALLREDUCE:
        return (NAME, *packed, forms.OP, *forms.FACTORS, PROCESS_SET)
    if form.kind is Kind.REDUCESCATTER:
        return (NAME, *packed, forms.OP, PROCESS_SET, *forms.FACTORS)
    if form.kind is Kind.BROADCAST:
        return (ROOT, NAME, PROCESS_SET)
    return (SPLITS, NAME, PROCESS_SET) if form.kind is Kind.ALLTOALL else (NAME, PROCESS_SET)


_START = ">>> import torch, wfbp.torch as wfbp\n>>> wfbp.init()\n"

_EXAMPLES = {
    "allreduce": f"{_START}>>> wfbp.allreduce(torch.tensor([1.0, 2.0]))\ntensor([1., 2.])",
    "alltoall": f"""{_START}\
>>> wfbp.alltoall(torch.arange(2 * wfbp.size())).shape[0] // wfbp.size()
2""",
}

__all__ = [*forms.FORMS, "sparse_allreduce_async"]
globals().update(forms.make_functions(__name__, parameters, perform, "", _EXAMPLES))
