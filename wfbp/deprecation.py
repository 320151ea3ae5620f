"""Old public names, which work for one more version and say what to write instead."""

from __future__ import annotations

import warnings

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
