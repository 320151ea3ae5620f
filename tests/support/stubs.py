"""``python -m tests.support.stubs`` writes the stubs of modules whose functions are generated.

Type checkers and editors read these files; ``tests/unit/test_stubs.py`` compares them with what
this writes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import wfbp
from wfbp.core.types import Op
from wfbp.runtime.collectives.forms import FORMS, Form
from wfbp.runtime.collectives.process_sets import global_process_set
from wfbp.runtime.named.coordinator import Kind

PACKAGE = Path(__file__).resolve().parents[2] / "wfbp"

_HEAD = '''"""Written by ``python -m tests.support.stubs``: do not edit."""

{imports}
from wfbp.core.types import Op
{operators}from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.operations import Handle
'''

_TOP = """from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, overload

import jax
import numpy as np
import numpy.typing as npt
import torch

"""

_TORCH_IMPORTS = """from collections.abc import Sequence
from typing import overload

import torch

"""

_T = """
T = TypeVar("T", npt.NDArray[Any], torch.Tensor, jax.Array)
Numbers: TypeAlias = float | Sequence[Any] | np.generic
"""

_HOROVOD = "from wfbp.horovod.torch.adasum import HorovodOp\n"

_TORCH = "from wfbp.torch.compression import Compression, Compressor\n"

_SPARSE = """
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]: ...
"""


def stub_of(module: str) -> str:
    """The text of a module's stub."""
    functions = vars(importlib.import_module(module))
    is_top = module == "wfbp.collectives"
    is_horovod = "horovod" in module
    imports = _TORCH_IMPORTS
    if is_horovod:
        imports = imports.replace("import Sequence", "import Callable, Sequence")
    head = _HEAD.replace("{imports}\n", _TOP if is_top else imports)
    head = head.replace("{operators}", _HOROVOD if is_horovod else "")
    parts = [head + (_T if is_top else _TORCH + (_SPARSE if is_horovod else ""))]
    for name, form in FORMS.items():
        parts += _declarations(form, functions[name], is_top)
    text = "\n".join(parts) + "\n"
    return (
        text if is_top else text.replace("[T]", "[torch.Tensor]").replace("T |", "torch.Tensor |")
    )


def stub_of_package() -> str:
    """The text of the package's own stub: its names, which it looks up on first use."""
    inside = vars(wfbp)
    lines = ['"""Written by ``python -m tests.support.stubs``: do not edit."""', ""]
    for home, names in sorted(inside["_HOMES"].items()):
        lines += [f"from {home} import {name} as {name}" for name in names]
    lines += ["from wfbp.core.types import Op", ""]
    lines += [f"{name} = Op.{name.upper()}" for name in inside["_OPS"]]
    return "\n".join([*lines, "__version__: str", "", f"__all__ = {sorted(wfbp.__all__)}", ""])


def _declarations(form: Form, function: Callable[..., Any], is_top: bool) -> list[str]:
    """One declaration of a function, or several overloads; the last one has the docstring."""
    signature = inspect.signature(function)
    tensor = "T" if is_top else "torch.Tensor"
    result = (
        str(signature.return_annotation).replace("T", tensor)
        if not is_top
        else (str(signature.return_annotation))
    )
    variants: list[tuple[dict[str, str], str]] = [({}, result)]
    if form.kind is Kind.ALLTOALL:
        pair = f"tuple[{tensor}, {tensor}]"
        variants = [
            ({"splits": "None"}, result),
            (
                {"splits": f"{tensor} | Sequence[int]"},
                pair if form.waits else f"Handle[{pair}]",
            ),
        ]
    elif is_top and form.name in ("allreduce", "broadcast", "allgather"):
        variants.append(({"tensor": "Numbers"}, "npt.NDArray[Any]"))
    texts = []
    for number, (changed, returns) in enumerate(variants):
        lines = []
        for p in signature.parameters.values():
            annotation = changed.get(p.name, str(p.annotation))
            if not is_top and annotation == "T":
                annotation = tensor
            required = p.default is p.empty or (
                # An overload for calls without splits has the default, that with splits has not.
                p.name == "splits" and number == 1
            )
            default = "" if required else f" = {_shown(p.default)}"
            lines.append(f"    {p.name}: {annotation}{default},")
        mark = "@overload\n" if len(variants) > 1 else ""
        body = " ..."
        if number == len(variants) - 1:
            body = f'\n    """{indent(function.__doc__ or "", "    ").strip()}\n    """'
        parameters = "\n".join(lines)
        texts.append(f"{mark}def {form.name}(\n{parameters}\n) -> {returns}:{body}")
    return texts


def _shown(default: object) -> str:
    """A default as source text."""
    if default is global_process_set:
        return "global_process_set"
    if isinstance(default, Op):
        return f"Op.{default.name}"
    return "Compression.none" if isinstance(default, type) else repr(default)


STUBS = {
    "wfbp.collectives": PACKAGE / "collectives.pyi",
    "wfbp.torch.collectives": PACKAGE / "torch" / "collectives.pyi",
    "wfbp.horovod.torch.collectives": PACKAGE / "horovod" / "torch" / "collectives.pyi",
}

if __name__ == "__main__":
    (PACKAGE / "__init__.pyi").write_text(stub_of_package())
    for module, path in STUBS.items():
        path.write_text(stub_of(module))
