from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

INSTRUCTIONS: str
"""The best set of kernels that this processor runs, in use unless another is chosen."""

def use_instructions(name: str) -> None:
    """Choose the kernels of later calls and tables by name (for tests and measurements)."""

class PackTable:
    def __init__(
        self,
        destination: npt.NDArray[np.uint8],
        offsets: Sequence[int] | npt.NDArray[np.int64],
        nbytes: Sequence[int] | npt.NDArray[np.int64],
        dtype: str,
        tensor_dtype: str = "",
    ) -> None: ...
    @property
    def pointers(self) -> npt.NDArray[np.int64]: ...
    def pack(self, scale: float = 1.0) -> None: ...
    def unpack(self) -> None: ...

def scale(buffer: npt.NDArray[Any], dtype: str, factor: float) -> None: ...
def reduce_shards(
    shards: Iterable[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    dtype: str,
    op: str,
    divisor: float = 1.0,
) -> None: ...

class Transfer:
    @property
    def done(self) -> bool: ...

class Transfers:
    def __init__(
        self,
        *,
        handle_bytes: int,
        isend: int,
        irecv: int,
        testsome: int,
        byte: int,
        status_bytes: int,
        error_at: int,
        success: int,
        error: type[Exception],
    ) -> None: ...
    def begin(
        self,
        comm: int,
        tag: int,
        messages: Sequence[tuple[npt.NDArray[Any], int, bool]],
        dtype: str = "uint8",
        op: str = "sum",
        divisor: float = 1.0,
        pieces: Sequence[tuple[Sequence[npt.NDArray[Any]], npt.NDArray[Any]]] = (),
        then: Sequence[tuple[npt.NDArray[Any], int, bool]] = (),
    ) -> Transfer: ...
    def progress(self) -> int: ...
    def rest(self, nap_s: float, most_s: float) -> int: ...
