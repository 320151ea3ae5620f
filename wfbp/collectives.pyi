"""Written by ``python -m tests.support.stubs``: do not edit."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, overload

import jax
import numpy as np
import numpy.typing as npt
import torch

from wfbp.core.types import Op
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.operations import Handle

T = TypeVar("T", npt.NDArray[Any], torch.Tensor, jax.Array)
Numbers: TypeAlias = float | Sequence[Any] | np.generic

@overload
def allreduce(
    tensor: T,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def allreduce(
    tensor: Numbers,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> npt.NDArray[Any]:
    """Combine a tensor or array over ranks.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> wfbp.allreduce(np.float32([1, 2]), op=wfbp.Sum) / wfbp.size()
        array([1., 2.], dtype=float32)
    """

def allreduce_(
    tensor: T,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Combine a tensor or array over ranks, in place.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> counts = np.ones(3, np.int8)
        >>> wfbp.allreduce_(counts, op=wfbp.Max) is counts
        True
    """

def allreduce_async(
    tensor: T,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to combine a tensor or array over ranks.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> handles = [wfbp.allreduce_async(np.full(2, k), name=f"part {k}") for k in range(3)]
        >>> [int(wfbp.synchronize(handle)[0]) for handle in handles]
        [0, 1, 2]
    """

def allreduce_async_(
    tensor: T,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to combine a tensor or array over ranks, in place.

    Args:
        tensor: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
    tensors: Sequence[T],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Combine several tensors or arrays over ranks.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> wfbp.grouped_allreduce([np.zeros(2), np.ones(1)])
        [array([0., 0.]), array([1.])]
    """

def grouped_allreduce_(
    tensors: Sequence[T],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Combine several tensors or arrays over ranks, in place.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
    tensors: Sequence[T],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin to combine several tensors or arrays over ranks.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
    tensors: Sequence[T],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin to combine several tensors or arrays over ranks, in place.

    Args:
        tensors: same shape and element type on every rank: float16, bfloat16, float32, float64,
            complex64, complex128, int8, int16, int32, int64, uint8 or bool. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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

@overload
def broadcast(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def broadcast(
    tensor: Numbers,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> npt.NDArray[Any]:
    """Copy the root's tensor or array to every rank.

    Args:
        tensor: same shape and element type on every rank. A PyTorch tensor (differentiable,
            unless it is changed in place or a handle comes back), an array of NumPy or CuPy, or
            what NumPy makes one of. Arrays that are not combined may be of any type but Python
            objects. JAX's arrays are taken by the functions of ``wfbp.jax`` alone: those that
            wait, return a new array and have no factors, splits or process sets.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast(np.arange(3), root_rank=0)
        array([0, 1, 2])
    """

def broadcast_(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Copy the root's tensor or array to every rank, in place.

    Args:
        tensor: same shape and element type on every rank. A PyTorch tensor (differentiable,
            unless it is changed in place or a handle comes back), an array of NumPy or CuPy, or
            what NumPy makes one of. Arrays that are not combined may be of any type but Python
            objects. JAX's arrays are taken by the functions of ``wfbp.jax`` alone: those that
            wait, return a new array and have no factors, splits or process sets.
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
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to copy the root's tensor or array to every rank.

    Args:
        tensor: same shape and element type on every rank. A PyTorch tensor (differentiable,
            unless it is changed in place or a handle comes back), an array of NumPy or CuPy, or
            what NumPy makes one of. Arrays that are not combined may be of any type but Python
            objects. JAX's arrays are taken by the functions of ``wfbp.jax`` alone: those that
            wait, return a new array and have no factors, splits or process sets.
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
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to copy the root's tensor or array to every rank, in place.

    Args:
        tensor: same shape and element type on every rank. A PyTorch tensor (differentiable,
            unless it is changed in place or a handle comes back), an array of NumPy or CuPy, or
            what NumPy makes one of. Arrays that are not combined may be of any type but Python
            objects. JAX's arrays are taken by the functions of ``wfbp.jax`` alone: those that
            wait, return a new array and have no factors, splits or process sets.
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

@overload
def allgather(
    tensor: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def allgather(
    tensor: Numbers,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> npt.NDArray[Any]:
    """Concatenate the rows of the tensors or arrays of all ranks, in rank order.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> len(wfbp.allgather(np.zeros((2, 3)))) == 2 * wfbp.size()
        True
    """

def allgather_async(
    tensor: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to concatenate the rows of the tensors or arrays of all ranks, in rank order.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
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
    tensors: Sequence[T],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Concatenate the rows of several tensors or arrays of all ranks, in rank order.

    Args:
        tensors: at least one dimension; sizes may differ in the first one only. A PyTorch
            tensor (differentiable, unless it is changed in place or a handle comes back), an
            array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may
            be of any type but Python objects. JAX's arrays are taken by the functions of
            ``wfbp.jax`` alone: those that wait, return a new array and have no factors, splits
            or process sets.
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
    tensors: Sequence[T],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin to concatenate the rows of several tensors or arrays of all ranks, in rank order.

    Args:
        tensors: at least one dimension; sizes may differ in the first one only. A PyTorch
            tensor (differentiable, unless it is changed in place or a handle comes back), an
            array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may
            be of any type but Python objects. JAX's arrays are taken by the functions of
            ``wfbp.jax`` alone: those that wait, return a new array and have no factors, splits
            or process sets.
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
    tensor: T,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def alltoall(
    tensor: T,
    splits: T | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[T, T]:
    """Send different rows to every rank, and receive rows from all.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> rows, received = wfbp.alltoall(np.arange(2 * wfbp.size()), splits=[2] * wfbp.size())
        >>> len(rows) == sum(received.tolist()) == 2 * wfbp.size()
        True
    """

@overload
def alltoall_async(
    tensor: T,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]: ...
@overload
def alltoall_async(
    tensor: T,
    splits: T | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[T, T]]:
    """Begin to send different rows to every rank, and receive rows from all.

    Args:
        tensor: at least one dimension; sizes may differ in the first one only. A PyTorch tensor
            (differentiable, unless it is changed in place or a handle comes back), an array of
            NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may be of
            any type but Python objects. JAX's arrays are taken by the functions of ``wfbp.jax``
            alone: those that wait, return a new array and have no factors, splits or process
            sets.
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
    tensor: T,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """Combine a tensor or array over ranks, and divide the rows equally.

    Args:
        tensor: at least one dimension; same shape and element type on every rank. A PyTorch
            tensor (differentiable, unless it is changed in place or a handle comes back), an
            array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may
            be of any type but Python objects. JAX's arrays are taken by the functions of
            ``wfbp.jax`` alone: those that wait, return a new array and have no factors, splits
            or process sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> len(wfbp.reducescatter(np.ones((3 * wfbp.size(), 2))))
        3
    """

def reducescatter_async(
    tensor: T,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[T]:
    """Begin to combine a tensor or array over ranks, and divide the rows equally.

    Args:
        tensor: at least one dimension; same shape and element type on every rank. A PyTorch
            tensor (differentiable, unless it is changed in place or a handle comes back), an
            array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may
            be of any type but Python objects. JAX's arrays are taken by the functions of
            ``wfbp.jax`` alone: those that wait, return a new array and have no factors, splits
            or process sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
    tensors: Sequence[T],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[T]:
    """Combine several tensors or arrays over ranks, and divide the rows equally.

    Args:
        tensors: at least one dimension; same shape and element type on every rank. A PyTorch
            tensor (differentiable, unless it is changed in place or a handle comes back), an
            array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may
            be of any type but Python objects. JAX's arrays are taken by the functions of
            ``wfbp.jax`` alone: those that wait, return a new array and have no factors, splits
            or process sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
    tensors: Sequence[T],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[T]]:
    """Begin to combine several tensors or arrays over ranks, and divide the rows equally.

    Args:
        tensors: at least one dimension; same shape and element type on every rank. A PyTorch
            tensor (differentiable, unless it is changed in place or a handle comes back), an
            array of NumPy or CuPy, or what NumPy makes one of. Arrays that are not combined may
            be of any type but Python objects. JAX's arrays are taken by the functions of
            ``wfbp.jax`` alone: those that wait, return a new array and have no factors, splits
            or process sets.
        name: matches the operations of ranks, which may submit them in different orders; those
            without a name match by their order.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated. Complex numbers have only ``Average`` and ``Sum``.
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
