"""The dictionary through which a module reads its parameters, replaced by one that tells of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from wfbp.torch.reading import Barrier


class Guarded(dict[str, Any]):
    """The parameters of one module, of which barriers hear before they are read.

    It takes the place of ``module._parameters``, through which modules read their parameters.
    Copies and pickles of it are plain dictionaries. Several views of all parameters
    (``items()``, ``values()``) count as reads of all, when they are made.
    """

    __slots__ = ("barriers", "plain")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = type(plain)
        self.barriers: tuple[Barrier, ...] = ()

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        for barrier in self.barriers:
            if barrier.active:
                barrier.read(value)
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            for barrier in self.barriers:
                barrier.expose(value)
        return value

    def __iter__(self) -> Iterator[str]:
        # With it, dict(self) and {**self} read through __getitem__.
        return super().__iter__()

    def __setitem__(self, name: str, value: Any) -> None:
        self._leaves(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._leaves(name, None)
        super().__delitem__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain, (), None, None, iter(self.items())

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it is what get() does

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            value = self[name]
            del self[name]
            return value
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def copy(self) -> dict[str, Any]:
        return self.plain(self.items())

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for barrier in self.barriers:
            if barrier.active:
                for value in dict.values(self):
                    barrier.read(value)

    def _leaves(self, name: str, successor: Any) -> None:
        held = dict.get(self, name)
        if held is not None and held is not successor:
            for barrier in self.barriers:
                barrier.leaves(held)
