"""The encoding of values in messages between ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} cannot be sent in a message: {value!r}")


_encoder = json.JSONEncoder(separators=(",", ":"), default=_plain)


def encode(value: Any) -> bytes:
    """A value of JSON's types, which may have NumPy's numbers; without line feeds."""
    return _encoder.encode(value).encode()


def decode(payload: bytes) -> Any:
    """The value; tuples have become lists."""
    return json.loads(payload)
