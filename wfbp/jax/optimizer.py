"""DistributedOptimizer: any optax transformation, with its gradients averaged over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wfbp.core.types import Op
from wfbp.jax.collectives import is_compiling
from wfbp.jax.gradient_hooks import TracedExchange
from wfbp.jax.gradient_sync import ExchangeOptions
from wfbp.jax.trees import Layout
from wfbp.runtime import process

if TYPE_CHECKING:
    import optax


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: optax.GradientTransformation,
    *,
    op: Op = Op.AVERAGE,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax transformation so that it gets gradients averaged over all ranks.

    ``update`` announces every gradient it is given and waits for all once. Where it is compiled
    into one program with ``jax.grad``, each gradient leaves as soon as backward has computed it.
    Use either this or :func:`wfbp.jax.value_and_grad`: with both, gradients travel twice, and what
    was summed is summed again.

    Args:
        optimizer: any optax transformation.
        op: ``Average`` or ``Sum``.
        schedule: how gradients are grouped: ``auto``, ``oasr``, ``mgwfbp``, ``wfbp``, ``single``
            or ``threshold``; by default what ``WFBP_SCHEDULE`` says, or ``auto``.
        threshold_bytes: group size of ``threshold``; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        name: for messages; different names keep apart what may run at once.

    Returns:
        A transformation with the same state.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optax transformation; when updates are computed, gradients that are no
            arrays.
        ValueError: a bad argument; when updates are computed, gradients that cannot be sent.

    Example:
        >>> import jax.numpy as jnp, optax, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> optimizer = wfbp.DistributedOptimizer(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params))
        >>> updates["w"]
        Array([-0.5, -0.5], dtype=float32)
    """
    import optax

    runtime = process.current("DistributedOptimizer()")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"expected an optax.GradientTransformation, found {type(optimizer).__qualname__}"
            f"{_remedy(optimizer)}"
        )
    inner = optax.with_extra_args_support(optimizer)
    options = ExchangeOptions("DistributedOptimizer", op, schedule, threshold_bytes, name)
    options.check(runtime.config)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        result: tuple[optax.Updates, optax.OptState] = inner.update(
            _averaged(updates, options), state, params, **extra_args
        )
        return result

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _remedy(optimizer: Any) -> str:
    if hasattr(optimizer, "gradient_transformation"):
        return "; pass its .gradient_transformation()"
    return "; call it first, as in optax.sgd(0.1)" if callable(optimizer) else ""


def _averaged(gradients: Any, options: ExchangeOptions) -> Any:
    runtime = process.current("DistributedOptimizer.update()")
    layout = Layout.of([gradients], ["gradients"], options.user)
    if not layout.specs:
        return gradients
    description = options.describe(runtime, layout)
    if runtime.size == 1:
        return gradients
    return layout.replace([gradients], TracedExchange(description, is_compiling()).wait)[0]
