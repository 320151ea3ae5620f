"""Functions that ``torch.compile`` leaves alone: it breaks its graph before them.

``torch.compiler.disable`` does that, too, but imports the compiler, which takes seconds, and adds a
call. Here a function is marked, at no cost where nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorator: neither the function nor its callees are compiled."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        disabled: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled
    # Where compiled code calls it, Dynamo would trace into it:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "wfbp communicates here"  # type: ignore[attr-defined]
    # And where it is called from what has been left out of a graph, Dynamo would begin a new one.
    # (What decorators have put around it, as contextlib does, belongs to other functions, too.)
    code = getattr(function, "__wrapped__", function).__code__
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function
