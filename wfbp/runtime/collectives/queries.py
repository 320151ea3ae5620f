"""What Horovod's programs ask about the job and about how the library was built."""

from __future__ import annotations

from importlib.util import find_spec

from wfbp.runtime import process
from wfbp.runtime.collectives.api import current


def cross_rank() -> int:
    """Number of this host among those that have a rank with this ``local_rank()``, from 0."""
    runtime = process.current("cross_rank()")
    local = [place for place, _ in current("cross_rank()").hosts[: runtime.rank]]
    return local.count(runtime.local_rank)


def cross_size() -> int:
    """Number of hosts that have a rank with this ``local_rank()``."""
    runtime = process.current("cross_size()")
    return [place for place, _ in current("cross_size()").hosts].count(runtime.local_rank)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len({size for _, size in current("is_homogeneous()").hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI may be called by several threads: always, else ``init()`` fails."""
    process.current("mpi_threads_supported()")
    return True


def mpi_enabled() -> bool:
    """Whether ranks talk through MPI: always."""
    return True


def mpi_built() -> bool:
    """Whether ranks can talk through MPI: always."""
    return True


def gloo_enabled() -> bool:
    """Whether ranks talk through Gloo: never."""
    return False


def gloo_built() -> bool:
    """Whether ranks can talk through Gloo: never."""
    return False


def nccl_built() -> int:
    """Version of NCCL by which Adasum would average within a host: 0, because it does not.

    Horovod's programs ask this to scale learning rates for Adasum. Which operations go by NCCL does
    not depend on how wfbp was built.
    """
    return 0


def ddl_built() -> bool:
    """Whether IBM's library is used: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's library is used: never."""
    return False


def cuda_built() -> bool:
    """Whether gradients on CUDA devices can be served: where CuPy is installed."""
    return find_spec("cupy") is not None


def rocm_built() -> bool:
    """Whether AMD's devices can be served: never."""
    return False
