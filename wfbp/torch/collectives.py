"""Collectives on tensors, under Horovod's names and with its arguments.

They are made of the table in ``wfbp.runtime.collectives.forms``; ``collectives.pyi`` declares them.
"""

from __future__ import annotations

from wfbp.runtime.collectives import forms
from wfbp.runtime.collectives.forms import Form, Parameters
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Compression
from wfbp.torch.tensor_operands import perform


def parameters(form: Form) -> Parameters:
    """Name, default and type of each parameter after the tensor."""
    compression = ("compression", Compression.none, "type[Compressor]")
    may_compress = form.waits and not form.in_place
    return forms.parameters(form, (compression,) if may_compress else ())


_START = ">>> import torch, wfbp.torch as wfbp\n>>> wfbp.init()\n"

_EXAMPLES = {
    "allreduce": f"{_START}>>> wfbp.allreduce(torch.tensor([1.0, 2.0]))\ntensor([1., 2.])",
    "alltoall": f"""{_START}\
>>> wfbp.alltoall(torch.arange(2 * wfbp.size())).shape[0] // wfbp.size()
2""",
}

__all__ = [*forms.FORMS]
_made = forms.make_functions(__name__, parameters, perform, "", _EXAMPLES)
globals().update({name: uncompiled(function) for name, function in _made.items()})
