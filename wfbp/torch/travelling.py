"""Parameters whose new values are on their way, and whoever changes or keeps them meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch


class Travelling:
    """Tells where a parameter was changed between the step and its arrival.

    PyTorch counts the changes of each tensor. It counts them together for tensors that have been
    made as parts of another one; of parameters that share their memory nothing is told.

    Any thread may ask; one at a time notes.

    Args:
        params: by index.
        names: of them.

    Example:
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> travelling = Travelling([param], ["weight"])
        >>> travelling.note([0], changed=[0])
        >>> with torch.no_grad():
        ...     _ = param.add_(1)
        >>> travelling.arrived(0)
        Traceback (most recent call last):
        RuntimeError: weight was changed in place while its update still travelled, ...
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._params = params
        self._names = names
        uses = Counter(p.untyped_storage().data_ptr() for p in params)
        self._alone = [
            p.untyped_storage().nbytes() == p.nbytes and uses[p.untyped_storage().data_ptr()] == 1
            for p in params
        ]
        self._versions: dict[int, int] = {}
        self._changed: Collection[int] = ()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._versions)

    @property
    def together(self) -> list[int]:
        """Of parameters of which nothing is told."""
        return [k for k, alone in enumerate(self._alone) if not alone]

    @property
    def indices(self) -> list[int]:
        """Of what has not arrived."""
        return list(self._versions)

    def note(self, indices: Iterable[int], changed: Collection[int] = ()) -> None:
        """These are on their way from now on, and no others.

        Args:
            indices: of parameters that nobody may change now.
            changed: those which the arrival changes without PyTorch's noticing.
        """
        self._changed = changed
        self._versions = {k: self._params[k]._version for k in indices if self._alone[k]}

    def arrived(self, index: int) -> None:
        """A parameter is whole: let whoever has kept it for backward hear that it has changed.

        Raises:
            RuntimeError: it was changed since :meth:`note`; told once.
        """
        if index not in self._versions:
            return
        with self._lock:
            version = self._versions.get(index)
            if version is None:
                return
            param = self._params[index]
            try:
                if param._version != version:
                    raise RuntimeError(
                        f"{self._names[index]} was changed in place while its update still "
                        "travelled, and may now differ from other ranks' or from what one process "
                        "would have: call optimizer.synchronize_parameters() before changing "
                        "parameters outside of modules"
                    )
                if index in self._changed:
                    torch.autograd.graph.increment_version(param)
            finally:
                del self._versions[index]  # last: who finds nothing there goes on
