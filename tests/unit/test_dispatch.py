"""The top level: lazy, and choosing an adapter by what it is given."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import wfbp
from wfbp.errors import NotInitializedError


def loaded_after(program: str) -> set[str]:
    """The top-level modules that a program loads."""
    script = f"{program}\nimport sys; print(*{{n.partition('.')[0] for n in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_importing_loads_nothing_heavy() -> None:
    assert not {"torch", "jax", "mpi4py", "numpy"} & loaded_after("import wfbp")
    assert not {"torch", "jax", "mpi4py"} & loaded_after("import wfbp; wfbp.TensorSpec; wfbp.Sum")


def test_arrays_do_not_load_torch() -> None:
    program = """
import numpy as np, wfbp
from tests.support.local import LocalWorld
wfbp.init(backend=LocalWorld(1).backend(0))
wfbp.allreduce(np.ones(2)); wfbp.broadcast(np.ones(2), 0); wfbp.allgather(np.ones(2))
wfbp.broadcast_parameters({"a": np.ones(2)}); wfbp.GradientReducer([("a", np.ones(2))])
try:
    wfbp.DistributedOptimizer(object())
except TypeError:
    pass
"""
    assert not {"torch", "jax", "mpi4py"} & loaded_after(program)


def test_every_public_name_exists() -> None:
    assert len(wfbp.__all__) <= 41
    for name in wfbp.__all__:
        assert getattr(wfbp, name) is not None
        assert name in dir(wfbp)
    assert wfbp.Average is wfbp.core.types.Op.AVERAGE  # type: ignore[attr-defined]
    assert wfbp.__version__
    with pytest.raises(AttributeError, match="'wfbp' has no attribute 'nothing'"):
        _ = wfbp.nothing  # type: ignore[attr-defined]


def test_torch_has_horovods_names() -> None:
    import wfbp.torch as hvd

    for name in hvd.__all__:
        assert hasattr(hvd, name)
    assert {"init", "shutdown", "rank", "size", "local_rank", "DistributedOptimizer"} <= set(
        hvd.__all__
    )


@pytest.mark.usefixtures("alone")
def test_join_takes_no_argument() -> None:
    assert wfbp.join() == 0
    with pytest.raises(TypeError):
        wfbp.join(0)  # type: ignore[call-arg]


@pytest.mark.usefixtures("alone")
def test_optimizers() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))

    class Mine(torch.optim.SGD):
        """A class of the user's."""

    optimizer = wfbp.DistributedOptimizer(Mine([parameter], lr=0.1), [("w", parameter)])
    assert isinstance(optimizer, Mine)
    parameter.sum().backward()
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9] * 3)
    wfbp.broadcast_optimizer_state(optimizer)
    for wrong in ({}, object(), "sgd", torch.ones(2)):
        with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
            wfbp.DistributedOptimizer(wrong)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        wfbp.broadcast_optimizer_state({})


@pytest.mark.usefixtures("alone")
def test_jax_is_recognised() -> None:
    jnp = pytest.importorskip("jax.numpy")
    optax = pytest.importorskip("optax")
    import jax

    for found in (
        wfbp.allreduce(jnp.ones(3)),
        jax.jit(wfbp.allreduce)(jnp.ones(3)),
        wfbp.broadcast(jnp.ones(3), 0),
        wfbp.allgather(jnp.ones(3)),
        wfbp.broadcast_parameters({"layer": [jnp.ones(3)]})["layer"][0],
    ):
        assert isinstance(found, jax.Array)
        assert found.tolist() == [1.0] * 3
    assert wfbp.reducescatter(jnp.ones(3), op=wfbp.Sum).tolist() == [1.0] * 3
    assert wfbp.alltoall(jnp.ones(3)).tolist() == [1.0] * 3
    with pytest.raises(TypeError, match=r"allreduce_async\(\) takes no arrays of JAX"):
        wfbp.allreduce_async(jnp.ones(3))
    with pytest.raises(TypeError, match=r"wfbp\.jax\.allreduce\(\) has no prescale_factor"):
        wfbp.allreduce(jnp.ones(3), prescale_factor=2.0)
    assert wfbp.broadcast_parameters({"w": np.ones(3)}) is None
    assert wfbp.broadcast_parameters({"w": torch.ones(3)}) is None
    for plain in (optax.sgd(0.5), optax.chain(optax.clip(1.0), optax.adam(0.1)), optax.identity()):
        assert isinstance(wfbp.DistributedOptimizer(plain), optax.GradientTransformation)


def test_optimizers_before_init() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(NotInitializedError, match=r"DistributedOptimizer\(\)"):
        wfbp.DistributedOptimizer(optimizer)
    with pytest.raises(NotInitializedError, match=r"allreduce\(\)"):
        wfbp.allreduce(torch.ones(2))
    with pytest.raises(NotInitializedError, match=r"broadcast_parameters\(\)"):
        wfbp.broadcast_parameters({"w": torch.ones(2)})


def test_a_generator_is_no_tree_of_jax(alone: None) -> None:
    pytest.importorskip("jax")
    pairs = [("w", np.ones(2))]
    wfbp.broadcast_parameters(pair for pair in pairs)
    with pytest.raises(TypeError, match="must be named"):
        wfbp.broadcast_parameters(array for _, array in [*pairs, ("b", np.ones(3))])
