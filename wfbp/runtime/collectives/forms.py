"""The table of public operations on tensors, and the functions made from it.

As in Horovod, ``allreduce`` waits, ``allreduce_async`` returns a handle, ``allreduce_`` writes into
its argument, and ``grouped_allreduce`` takes several tensors. ``tests/support/stubs.py`` writes the
stubs (``.pyi``) from the same table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from textwrap import fill, indent
from typing import Any, NamedTuple

from wfbp.core.types import Op
from wfbp.runtime.collectives.process_sets import global_process_set
from wfbp.runtime.named.coordinator import Kind


class Form(NamedTuple):
    """One public function."""

    name: str
    kind: Kind
    in_place: bool
    waits: bool
    grouped: bool


def _forms() -> dict[str, Form]:
    found = {}
    for kind, may_be_in_place, may_be_grouped in (
        (Kind.ALLREDUCE, True, True),
        (Kind.BROADCAST, True, False),
        (Kind.ALLGATHER, False, True),
        (Kind.ALLTOALL, False, False),
        (Kind.REDUCESCATTER, False, True),
    ):
        for grouped in (False, True)[: 1 + may_be_grouped]:
            for waits in (True, False):
                for in_place in (False, True)[: 1 + may_be_in_place]:
                    prefix, suffix = "grouped_" * grouped, "" if waits else "_async"
                    name = f"{prefix}{kind.value}{suffix}{'_' * in_place}"
                    found[name] = Form(name, kind, in_place, waits, grouped)
    return found


FORMS = _forms()

NAME = ("name", None, "str | None")
PROCESS_SET = ("process_set", global_process_set, "ProcessSet")
FACTORS = (("prescale_factor", 1.0, "float"), ("postscale_factor", 1.0, "float"))
OP = ("op", Op.AVERAGE, "Op")
ROOT = ("root_rank", inspect.Parameter.empty, "int")
SPLITS = ("splits", None, "T | Sequence[int] | None")

Parameters = tuple[tuple[str, Any, str], ...]
"""Name, default and type of each parameter after the tensor."""


def parameters(form: Form, further: Parameters = ()) -> Parameters:
    """The parameters of a function, in Horovod's order; ``further`` ones come after the name."""
    if form.kind is Kind.ALLREDUCE:
        return (NAME, *further, OP, *FACTORS, PROCESS_SET)
    if form.kind is Kind.REDUCESCATTER:
        return (NAME, *further, OP, PROCESS_SET, *FACTORS)
    if form.kind is Kind.BROADCAST:
        return (ROOT, NAME, PROCESS_SET)
    return (SPLITS, NAME, PROCESS_SET) if form.kind is Kind.ALLTOALL else (NAME, PROCESS_SET)


_WHAT = {
    Kind.ALLREDUCE: "combine {a} over ranks",
    Kind.BROADCAST: "copy the root's {one} to every rank",
    Kind.ALLGATHER: "concatenate the rows of {some} of all ranks, in rank order",
    Kind.ALLTOALL: "send different rows to every rank, and receive rows from all",
    Kind.REDUCESCATTER: "combine {a} over ranks, and divide the rows equally",
}

_TENSOR = {
    Kind.ALLREDUCE: "same shape and element type on every rank: float16, bfloat16, float32, "
    "float64, complex64, complex128, int8, int16, int32, int64, uint8 or bool.",
    Kind.BROADCAST: "same shape and element type on every rank.",
    Kind.ALLGATHER: "at least one dimension; sizes may differ in the first one only.",
    Kind.ALLTOALL: "at least one dimension; sizes may differ in the first one only.",
    Kind.REDUCESCATTER: "at least one dimension; same shape and element type on every rank.",
}

_MEANING = {
    "name": "matches the operations of ranks, which may submit them in different orders; those "
    "without a name match by their order.",
    "compression": "element type of floating point in messages.",
    "op": "``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is "
    "truncated. Complex numbers have only ``Average`` and ``Sum``.",
    "prescale_factor": "multiplies before the reduction; integers in float64, truncated.",
    "postscale_factor": "multiplies after it.",
    "root_rank": "number of the rank that has the values, among all ranks.",
    "splits": "number of rows for each rank, which add up to all rows; equal parts by default.",
    "process_set": "the ranks that take part.",
}

_RESULT = {
    Kind.ALLTOALL: "the received rows, in rank order; with ``splits`` also their number from each "
    "rank (int32).",
    Kind.REDUCESCATTER: "this rank's rows, new and of the argument's kind. If they do not divide "
    "equally, the first ranks get one more.",
}

_RAISES = (
    "TypeError: an argument of the wrong kind.",
    "ValueError: an element type or shape that cannot be sent, a name that is pending, or a rank "
    "or root outside the process set.",
    "DisagreementError: on every rank, if ranks' operations of one name differ.",
)


def _docstring(
    form: Form, names: list[str], notes: str, meanings: Mapping[str, str], example: str
) -> str:
    one, many = ("tensor or array", "tensors or arrays") if notes else ("tensor", "tensors")
    what = _WHAT[form.kind].format(
        a=f"several {many}" if form.grouped else f"a {one}",
        one="several" if form.grouped else one,
        some=f"several {many}" if form.grouped else f"the {many}",
    )
    first = f"{'' if form.waits else 'begin to '}{what}{', in place' * form.in_place}."
    result = _RESULT.get(form.kind, "a new one, of the argument's kind.")
    if form.in_place:
        result = "the argument." if form.waits else "the argument; do not touch it until then."
    elif not form.waits:
        result = "the result of the waiting function."
    result = "a list: " * form.grouped + result
    if not form.waits:
        result = f"a handle for :func:`synchronize`, which returns {result}"

    def block(title: str, *items: str) -> str:
        return f"{title}:\n" + "\n".join(
            indent(fill(item, 88, subsequent_indent="    " * (len(items) > 1)), "    ")
            for item in items
        )

    meaning = {names[0]: f"{_TENSOR[form.kind]} {notes}", **_MEANING, **meanings}
    first, result = (text[0].upper() + text[1:] for text in (first, result))
    differentiable = form.waits and not form.in_place and not notes
    blocks = [first, *["Differentiable."] * differentiable]
    blocks.append(block("Args", *(f"{name}: {meaning[name]}" for name in names)))
    blocks += [block("Returns", result), block("Raises", *_RAISES)]
    if example:
        blocks.append("Example:\n" + indent(example, "    "))
    return "\n\n".join(blocks) + "\n"


def make_functions(
    module: str,
    parameters: Callable[[Form], Parameters],
    perform: Callable[..., Any],
    notes: str = "",
    examples: Mapping[str, str] = {},
    meanings: Mapping[str, str] = {},
) -> dict[str, Callable[..., Any]]:
    """The public functions of a module, by name; the rest is for docstrings."""
    made = {}
    for name, form in FORMS.items():
        made[name] = call = _make_function(form, parameters(form), perform)
        call.__module__ = module
        names = list(inspect.signature(call).parameters)
        call.__doc__ = _docstring(form, names, notes, meanings, examples.get(name, ""))
    return made


def _make_function(
    form: Form, parameters: Parameters, perform: Callable[..., Any]
) -> Callable[..., Any]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tensor = ("tensors", "Sequence[T]") if form.grouped else ("tensor", "T")
    listed = [inspect.Parameter(tensor[0], kind, annotation=tensor[1])]
    listed += [inspect.Parameter(n, kind, default=d, annotation=t) for n, d, t in parameters]
    result = "T" if not form.grouped else "list[T]"
    returns = result if form.waits else f"Handle[{result}]"
    signature = inspect.Signature(listed, return_annotation=returns)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(signature.parameters)
            raise TypeError(f"{form.name}(): {error}; its arguments are {names}") from None
        given.apply_defaults()
        return perform(form, given.arguments.pop(tensor[0]), **given.arguments)

    call.__name__ = call.__qualname__ = form.name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
