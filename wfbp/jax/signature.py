"""What is known of a function's arguments before it is called."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any


def argument_numbers(fun: Any, argnums: Any, user: str) -> tuple[int, ...]:
    """The numbers of the arguments to differentiate by.

    Args:
        fun: what is to be differentiated.
        argnums: as in JAX: a whole number or a sequence of them, from the end where negative.
        user: who asks, for messages.

    Raises:
        TypeError: not a function, no numbers, or an argument that the function does not have.
            JAX would say so when gradients are computed.
    """
    if not callable(fun):
        raise TypeError(
            f"{user}: expected a function, found a {type(fun).__qualname__}; pass the loss itself, "
            "and call what is returned"
        )
    try:
        listed = argnums if isinstance(argnums, Sequence) else (argnums,)
        numbers = tuple(map(operator.index, listed))
    except TypeError:
        raise TypeError(
            f"{user}: argnums is {argnums!r}; expected a whole number, or a sequence of them"
        ) from None
    count = _num_positional(fun)
    if count is not None and not all(-count <= number < count for number in numbers):
        raise TypeError(
            f"{user}: argnums is {argnums!r}, but the function has {count} positional "
            f"argument{'s' * (count != 1)}"
        )
    return numbers


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """What a function calls its first positional arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[k] if k < len(names) else f"args[{k}]" for k in range(count)]


def _num_positional(fun: Callable[..., Any]) -> int | None:
    """How many positional arguments a function takes; None where any number, or unknown."""
    try:
        # What wraps another function may take other arguments than that.
        parameters = inspect.signature(fun, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
