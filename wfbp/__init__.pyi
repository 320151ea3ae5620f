"""Written by ``python -m tests.support.stubs``: do not edit."""

from wfbp.collectives import allgather as allgather
from wfbp.collectives import allgather_async as allgather_async
from wfbp.collectives import allreduce as allreduce
from wfbp.collectives import allreduce_ as allreduce_
from wfbp.collectives import allreduce_async as allreduce_async
from wfbp.collectives import alltoall as alltoall
from wfbp.collectives import broadcast as broadcast
from wfbp.collectives import broadcast_ as broadcast_
from wfbp.collectives import broadcast_async as broadcast_async
from wfbp.collectives import grouped_allreduce as grouped_allreduce
from wfbp.collectives import reducescatter as reducescatter
from wfbp.collectives import reducescatter_async as reducescatter_async
from wfbp.config import Config as Config
from wfbp.core.types import Op
from wfbp.core.types import TensorSpec as TensorSpec
from wfbp.dispatch import DistributedOptimizer as DistributedOptimizer
from wfbp.dispatch import broadcast_optimizer_state as broadcast_optimizer_state
from wfbp.dispatch import broadcast_parameters as broadcast_parameters
from wfbp.dispatch import join as join
from wfbp.launcher.function import run as run
from wfbp.runtime.api.array_reducer import GradientReducer as GradientReducer
from wfbp.runtime.collectives.api import add_process_set as add_process_set
from wfbp.runtime.collectives.api import allgather_object as allgather_object
from wfbp.runtime.collectives.api import barrier as barrier
from wfbp.runtime.collectives.api import broadcast_object as broadcast_object
from wfbp.runtime.collectives.api import init as init
from wfbp.runtime.collectives.api import poll as poll
from wfbp.runtime.collectives.api import remove_process_set as remove_process_set
from wfbp.runtime.collectives.api import synchronize as synchronize
from wfbp.runtime.collectives.process_sets import ProcessSet as ProcessSet
from wfbp.runtime.collectives.process_sets import global_process_set as global_process_set
from wfbp.runtime.process import is_initialized as is_initialized
from wfbp.runtime.process import local_rank as local_rank
from wfbp.runtime.process import local_size as local_size
from wfbp.runtime.process import rank as rank
from wfbp.runtime.process import shutdown as shutdown
from wfbp.runtime.process import size as size

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT
__version__: str

__all__ = [
    "Average",
    "Config",
    "DistributedOptimizer",
    "GradientReducer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "TensorSpec",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
    "synchronize",
]
