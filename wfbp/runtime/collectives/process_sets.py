"""Groups of ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from wfbp.runtime import process
from wfbp.runtime.named.operations import Collectives


class ProcessSet:
    """Some of the ranks of this job; every rank passes it to :func:`add_process_set`.

    Args:
        ranks: numbers of the ranks, in any order.

    Attributes:
        process_set_id: number of the set once it is added; the same on every rank.

    Raises:
        TypeError: no numbers, such as a communicator, whose ranks the others cannot find.

    Example:
        >>> import wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.global_process_set.size() == wfbp.size()
        True
    """

    def __init__(self, ranks: Iterable[int] | None) -> None:
        self.process_set_id: int | None = None
        self._owner: Collectives | None = None
        self._ranks: list[int] | None = None
        if ranks is not None:
            try:
                self._ranks = sorted(int(rank) for rank in ranks)
            except (TypeError, ValueError):
                raise TypeError(
                    f"a process set is made of the numbers of its ranks; found {ranks!r}. Add one "
                    "set per part of a split communicator, on every rank"
                ) from None

    @property
    def ranks(self) -> list[int] | None:
        """Numbers of the ranks, ascending; None of all ranks before ``wfbp.init()``."""
        if self._ranks is not None:
            return list(self._ranks)
        return list(range(process.size())) if process.is_initialized() else None

    def included(self) -> bool:
        """Whether this rank is in the set.

        Raises:
            ValueError: the set was not added.
        """
        self.known_id()
        return process.rank() in (self.ranks or ())

    def rank(self) -> int:
        """This rank's number in the set, from 0; -1 if it is not in the set.

        Raises:
            ValueError: the set was not added.
        """
        return (self.ranks or []).index(process.rank()) if self.included() else -1

    def size(self) -> int:
        """Number of ranks in the set.

        Raises:
            ValueError: the set was not added.
        """
        self.known_id()
        return len(self.ranks or ())

    def known_id(self, call: str = "an operation of a process set") -> int:
        """The set's number; ``ValueError`` if it was not added. ``call`` is for messages."""
        operations = process.operations(call)
        if self is global_process_set:
            return 0
        if self.process_set_id is None or self._owner is not operations:
            raise ValueError(
                f"the process set of ranks {self._ranks} is not known: pass it to "
                "add_process_set() on every rank, or to init(process_sets=...)"
            )
        return self.process_set_id

    def bind(self, owner: Collectives | None, number: int | None) -> None:
        """Record that the set was added, or removed."""
        self._owner, self.process_set_id = owner, number
        if owner is not None and number is not None:
            self._ranks = list(owner.sets[number])

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """Itself, so that copied layers communicate with the same ranks."""
        return self

    def __reduce__(self) -> Any:
        if self is global_process_set:
            return "global_process_set"
        return ProcessSet, (self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet(None)
"""All ranks."""
global_process_set.process_set_id = 0
