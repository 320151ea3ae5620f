"""Top-level operations, made from ``wfbp.runtime.collectives.forms``; see ``collectives.pyi``."""

from __future__ import annotations

from wfbp.dispatch import perform
from wfbp.runtime.collectives import forms

_TENSORS = (
    "A PyTorch tensor (differentiable, unless it is changed in place or a handle comes back), an "
    "array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of "
    "any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax`` alone: "
    "those that wait, return a new array and have no factors, splits or process sets."
)

_START = ">>> import numpy as np, wfbp\n>>> wfbp.init()\n"

_EXAMPLES = {
    "allreduce": f"""{_START}>>> wfbp.allreduce(np.float32([1, 2]), op=wfbp.Sum) / wfbp.size()
array([1., 2.], dtype=float32)""",
    "allreduce_": f"""{_START}>>> counts = np.ones(3, np.int8)
>>> wfbp.allreduce_(counts, op=wfbp.Max) is counts
True""",
    "allreduce_async": f"""{_START}\
>>> handles = [wfbp.allreduce_async(np.full(2, k), name=f"part {{k}}") for k in range(3)]
>>> [int(wfbp.synchronize(handle)[0]) for handle in handles]
[0, 1, 2]""",
    "grouped_allreduce": f"""{_START}>>> wfbp.grouped_allreduce([np.zeros(2), np.ones(1)])
[array([0., 0.]), array([1.])]""",
    "broadcast": f"""{_START}>>> wfbp.broadcast(np.arange(3), root_rank=0)
array([0, 1, 2])""",
    "allgather": f"""{_START}>>> len(wfbp.allgather(np.zeros((2, 3)))) == 2 * wfbp.size()
True""",
    "alltoall": f"""{_START}\
>>> rows, received = wfbp.alltoall(np.arange(2 * wfbp.size()), splits=[2] * wfbp.size())
>>> len(rows) == sum(received.tolist()) == 2 * wfbp.size()
True""",
    "reducescatter": f"""{_START}>>> len(wfbp.reducescatter(np.ones((3 * wfbp.size(), 2))))
3""",
}

globals().update(forms.make_functions(__name__, forms.parameters, perform, _TENSORS, _EXAMPLES))
