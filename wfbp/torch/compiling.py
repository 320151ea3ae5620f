"""Compiled models: pieces that overlap, and functions that ``torch.compile`` must leave alone.

``torch.compile`` makes one graph of a whole model, and one of its backward. Autograd sees a single
operation whose gradients and hooks all come at its end, so nothing could overlap. PyTorch's answer
for DistributedDataParallel (``torch._dynamo``'s DDPOptimizer) cuts the graph of forward into pieces
by the size of their parameters. Each piece has its own backward. The same cuts serve here, and
need not know the groups: the times at which gradients appear are measured, and groups planned from
them. (What compiled models do to plans that decouple: see ``pending``.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch

Compiled = Callable[..., Any]
Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Compiled]

PIECE_BYTES = 25 * 2**20
_FIRST_PIECE_BYTES = 2**20
"""Small, as in DDP, so that backward's first gradients leave early."""


def compile_backend(inner: str | Backend = "inductor", piece_bytes: int = PIECE_BYTES) -> Backend:
    """A backend for ``torch.compile`` that lets gradients travel while backward computes.

    The model is compiled in pieces, because what is compiled in one gives all gradients at its end.
    Smaller pieces overlap more, and let the compiler fuse less.

    Args:
        inner: compiles the pieces: the name of a backend of ``torch.compile``, or a function of a
            graph and its inputs.
        piece_bytes: size of a piece's parameters in bytes, about; the last piece of the model,
            which is the first one of backward, is smaller.

    Returns:
        The value for ``torch.compile``'s ``backend``. It takes no ``mode`` and no ``options``: set
        those in ``torch._inductor.config``.

    Raises:
        ValueError: ``piece_bytes`` is less than 1; or, when the model is compiled,
            ``torch.compile`` was given a mode or options.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> fast = torch.compile(model, backend=wfbp.compile_backend("eager", piece_bytes=100))
        >>> fast(torch.ones(4, 8)).shape
        torch.Size([4, 1])
    """
    if piece_bytes < 1:
        raise ValueError(f"piece_bytes is {piece_bytes}; expected at least 1")
    return _in_pieces(inner, piece_bytes)


@cache  # torch.compile recompiles a function for each new backend, up to a limit
def _in_pieces(inner: str | Backend, piece_bytes: int) -> Backend:
    def compile_in_pieces(
        graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> Compiled:
        from torch._dynamo import lookup_backend
        from torch._dynamo.backends.distributed import DDPOptimizer

        if options:
            raise ValueError(
                f"torch.compile was given {', '.join(options)}, which compile_backend() does not "
                "take: set them in torch._inductor.config"
            )
        whole: Any = lookup_backend(inner) if isinstance(inner, str) else inner
        first_bytes = min(_FIRST_PIECE_BYTES, piece_bytes)
        cutter: Any = DDPOptimizer(piece_bytes, whole, first_bytes)
        compiled: Compiled = cutter.compile_fn(graph, inputs)
        return compiled

    return compile_in_pieces


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorator: neither the function nor its callees are compiled.

    ``torch.compiler.disable`` does that, too, but imports the compiler, which takes seconds, and
    adds a call. Here a function is marked, at no cost where nothing is compiled.
    """
    frames: Any = torch._C._dynamo.eval_frame
    # If compiled code calls the function, Dynamo would trace into it:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "wfbp communicates here"  # type: ignore[attr-defined]
    # If code left out of a graph calls it, Dynamo would begin a new graph.
    # (What decorators have put around it, as contextlib does, belongs to other functions, too.)
    code = getattr(function, "__wrapped__", function).__code__
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


K = TypeVar("K", bound=type)


def uncompiled_methods(kind: K) -> K:
    """Decorator: as :func:`uncompiled`, for what a class defines itself."""
    for value in vars(kind).values():
        if isinstance(value, FunctionType):
            uncompiled(value)
    return kind
