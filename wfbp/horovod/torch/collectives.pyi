"""Written by ``python -m tests.support.stubs``: do not edit."""

from collections.abc import Callable, Sequence
from typing import overload

import torch

from wfbp.core.types import Op
from wfbp.horovod.torch.adasum import HorovodOp
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.operations import Handle
from wfbp.torch.compression import Compression, Compressor

def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]: ...
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over ranks.

    Differentiable.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        compression: element type of floating point in messages.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A new one, of the argument's kind.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.

    Example:
        >>> import torch, wfbp.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum)  # alike on every rank
        tensor([1., 2.])
    """

def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over ranks, in place.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        The argument.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to combine a tensor over ranks.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns the result of the waiting function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to combine a tensor over ranks, in place.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns the argument; do not touch it until
        then.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors over ranks.

    Differentiable.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        compression: element type of floating point in messages.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A list: a new one, of the argument's kind.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors over ranks, in place.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A list: the argument.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin to combine several tensors over ranks.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns a list: the result of the waiting
        function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin to combine several tensors over ranks, in place.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool.
        average: Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns a list: the argument; do not touch it
        until then.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the root's tensor to every rank.

    Differentiable.

    Args:
        tensor: same shape and element type on every rank.
        root_rank: number of the rank that has the values, among all ranks.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A new one, of the argument's kind.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the root's tensor to every rank, in place.

    Args:
        tensor: same shape and element type on every rank.
        root_rank: number of the rank that has the values, among all ranks.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        The argument.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to copy the root's tensor to every rank.

    Args:
        tensor: same shape and element type on every rank.
        root_rank: number of the rank that has the values, among all ranks.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns the result of the waiting function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to copy the root's tensor to every rank, in place.

    Args:
        tensor: same shape and element type on every rank.
        root_rank: number of the rank that has the values, among all ranks.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns the argument; do not touch it until
        then.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate the rows of the tensors of all ranks, in rank order.

    Differentiable.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A new one, of the argument's kind.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to concatenate the rows of the tensors of all ranks, in rank order.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns the result of the waiting function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Concatenate the rows of several tensors of all ranks, in rank order.

    Differentiable.

    Args:
        tensors: at least one dimension; sizes may differ in the first one only.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A list: a new one, of the argument's kind.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin to concatenate the rows of several tensors of all ranks, in rank order.

    Args:
        tensors: at least one dimension; sizes may differ in the first one only.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns a list: the result of the waiting
        function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send different rows to every rank, and receive rows from all.

    Differentiable.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only.
        splits: number of rows for each rank, which add up to all rows; equal parts by default.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        The received rows, in rank order; with ``splits`` also their number from each rank
        (int32).

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

@overload
def alltoall_async(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]: ...
@overload
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Begin to send different rows to every rank, and receive rows from all.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only.
        splits: number of rows for each rank, which add up to all rows; equal parts by default.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`, which returns the result of the waiting function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine a tensor over ranks, and divide the rows equally.

    Differentiable.

    Args:
        tensor: at least one dimension; same shape and element type on every rank.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        compression: element type of floating point in messages.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.

    Returns:
        This rank's rows, new and of the argument's kind. If they do not divide equally, the
        first ranks get one more.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Begin to combine a tensor over ranks, and divide the rows equally.

    Args:
        tensor: at least one dimension; same shape and element type on every rank.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.

    Returns:
        A handle for :func:`synchronize`, which returns the result of the waiting function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combine several tensors over ranks, and divide the rows equally.

    Differentiable.

    Args:
        tensors: at least one dimension; same shape and element type on every rank.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        compression: element type of floating point in messages.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.

    Returns:
        A list: this rank's rows, new and of the argument's kind. If they do not divide equally,
        the first ranks get one more.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """

def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Begin to combine several tensors over ranks, and divide the rows equally.

    Args:
        tensors: at least one dimension; same shape and element type on every rank.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction; integers in float64, truncated.
        postscale_factor: multiplies after it.

    Returns:
        A handle for :func:`synchronize`, which returns a list: the result of the waiting
        function.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an element type or shape that cannot be sent, a name that is pending, or a
            rank or root outside the process set.
        DisagreementError: on every rank, if ranks' operations of one name differ.
    """
