"""Announcements and waits in a program, as JAX primitives.

Which exchange they belong to is settled when the program is lowered, because only then all of it is
known: functions within it may have been traced in any order, and long before. What is equal but for
its place in the program is counted in the order of the text, which is the same on every rank.

Neither declares a side effect: it would keep XLA from running announcements beside computation, and
JAX from starting compiled programs without Python, which costs 20 us per leaf. What is not used is
left out of the program, on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from wfbp.jax.exchange import ExchangeKey


@dataclass(frozen=True, eq=False)
class Site:
    """One place in a program's text at which gradients are exchanged.

    Args:
        request: what is exchanged; that of other sites may be equal.
        add: makes a request known; returns its key.
    """

    request: ExchangeKey
    add: Callable[[ExchangeKey], int]


def announce(gradient: Any, site: Site, index: int) -> Any:
    """A gradient leaves as soon as it exists; what is returned must go into :func:`wait`.

    XLA runs a call as soon as its operands exist: this one has a single operand.
    """
    (announced,) = _announce.bind(gradient, site=site, index=index)
    return announced


def wait(gradients: Sequence[Any], site: Site) -> list[Any]:
    """All gradients of a site, reduced. None of them can be dropped on its own."""
    reduced: list[Any] = _wait.bind(*gradients, site=site)
    return reduced


_sites: WeakKeyDictionary[Any, dict[Site, int]] = WeakKeyDictionary()
"""The keys of each program that is being lowered, by its MLIR context."""
_sites_lock = threading.Lock()


def _key(program: Any, site: Site) -> int:
    with _sites_lock:
        keys = _sites.setdefault(program, {})
        if site not in keys:
            turn = sum(other.request == site.request for other in keys)
            keys[site] = site.add(replace(site.request, turn=turn))
        return keys[site]


def _lowered(
    target: str, context: Any, *operands: Any, site: Site, index: int | None = None
) -> Any:
    """A call of an XLA handler whose results may lie where its operands did."""
    attributes: dict[str, Any] = {"exchange": np.int64(_key(context.module_context.context, site))}
    if index is not None:
        attributes["index"] = np.int32(index)
    aliases = {k: k for k in range(len(operands))}
    call = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return call(context, *operands, **attributes)


def _batched(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "averaged gradients cannot be mapped by vmap: each step exchanges every gradient once. "
        "Use vmap inside the loss, or on jax.grad, and average the result"
    )


def _differentiated(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "cannot differentiate averaged gradients; average what jax.grad of jax.grad gives, "
        "with wfbp.jax.allreduce or DistributedOptimizer"
    )


def _make(target: str) -> Primitive:
    primitive = Primitive(target)
    primitive.multiple_results = True

    def by_itself(*operands: Any, **parameters: Any) -> Any:
        return jax.jit(partial(primitive.bind, **parameters))(*operands)

    primitive.def_impl(by_itself)
    primitive.def_abstract_eval(lambda *avals, **_: [a.update(weak_type=False) for a in avals])
    ad.primitive_jvps[primitive] = _differentiated
    batching.primitive_batchers[primitive] = _batched
    mlir.register_lowering(primitive, partial(_lowered, target), cacheable=False)
    return primitive


_announce = _make("wfbp_announce")
_wait = _make("wfbp_wait")
