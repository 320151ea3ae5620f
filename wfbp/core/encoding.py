"""The encoding of values in messages between ranks."""

from __future__ import annotations

import json
from typing import Any

_encoder = json.JSONEncoder(separators=(",", ":"), default=lambda number: number.item())


def encode(value: Any) -> bytes:
    """A value of JSON's types, which may have NumPy's numbers; without line feeds."""
    return _encoder.encode(value).encode()


def decode(payload: bytes) -> Any:
    """The value; tuples have become lists."""
    return json.loads(payload)
