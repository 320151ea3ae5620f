"""Old public names, which work for one more version and say what to write instead."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[str] = set()


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn, once per process, that ``old`` is deprecated.

    Args:
        old: what was used, as messages show it.
        new: what to use instead.
        stacklevel: of the caller's frame, as for :func:`warnings.warn`.
    """
    if old not in _warned:
        _warned.add(old)
        warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel)


def renamed_keyword(old: str, new: str) -> Callable[[F], F]:
    """Let a function take an argument by its old name; for decorating."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                name = function.__name__
                warn_renamed(f"wfbp.{name}({old}=...)", f"wfbp.{name}({new}=...)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
