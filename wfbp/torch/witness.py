"""Notices gradients that were touched between their hooks and their reduction."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from wfbp.torch.late_sample import LateSample

_SAMPLE_BYTES = 64


class Witness:
    """Gradients as their hooks saw them. Used by the training thread and by backward's.

    Args:
        name: of the optimizer, for messages.
        names: of its parameters.
        last: those whose gradients have not left by the time the step is closed. One of them is
            sampled, after which the others are taken out, which spares their hooks the call.
    """

    def __init__(self, name: str, names: Sequence[str], last: set[int]) -> None:
        self._name = name
        self._names = names
        self._last = last
        self.grads: list[torch.Tensor | None] = [None] * len(names)
        """By index, written by the hooks; None where no hook has run."""
        self.versions = [0] * len(names)
        """How often each had been changed in place by then."""
        self._sampled = -1
        self._sample = b""
        self._late = LateSample()
        self._clean = self.grads[:]

    def sample(self, index: int, grad: torch.Tensor) -> None:
        """Remember the first bytes of one gradient that nobody but the program can change yet.

        Not every operation in place makes a new version: ``GradScaler.unscale_`` does not.
        """
        if self._sampled in (-1, index):
            self._sampled, self._sample = index, _first_bytes(grad)
            self._last.intersection_update((index,))
            if _is_elsewhere(grad):
                self._late.take(grad)

    def check(self, params: Sequence[torch.Tensor]) -> list[int]:
        """Compare every gradient with what its hook saw.

        Returns:
            Indices of parameters whose gradients are gone.

        Raises:
            RuntimeError: a gradient was changed or replaced, here or, on a device, in an earlier
                step.
        """
        late = self._late.found()
        if late is not None:
            raise self._touched(late, "changed in place, some steps ago,")
        gone = []
        for index, (seen, param) in enumerate(zip(self.grads, params, strict=True)):
            if seen is None:
                continue
            grad = param.grad
            if grad is seen:
                if seen._version != self.versions[index]:
                    raise self._touched(index, "changed in place")
            elif grad is None:
                gone.append(index)
            else:
                raise self._touched(index, "replaced")
        sampled = self._sampled
        if sampled >= 0 and sampled not in gone:
            grad = self.grads[sampled]
            if grad is not None and _first_bytes(grad) != self._sample:
                raise self._touched(sampled, "changed in place")
            if grad is not None and _is_elsewhere(grad):
                self._late.compare(sampled, grad)
        return gone

    def clear(self) -> None:
        """Forget all gradients. The lists stay the same ones."""
        self.grads[:] = self._clean
        self._sampled = -1
        self._late.end_step()

    def _touched(self, index: int, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name}: the gradient of {self._names[index]} was {how} after backward and "
            "before it was averaged over the ranks. Call optimizer.synchronize() first, then "
            "change gradients, then step inside 'with optimizer.skip_synchronize():'; to forget "
            "gradients, call optimizer.zero_grad()"
        )


def _is_elsewhere(grad: torch.Tensor) -> bool:
    """Whether the host would have to wait for a gradient's values."""
    return grad.device.type != "cpu" and not grad.is_sparse and bool(grad.numel())


def _first_bytes(grad: torch.Tensor) -> bytes:
    if grad.is_sparse or not grad.numel() or grad.device.type != "cpu":
        return b""
    known = grad.nbytes if grad.is_contiguous() else grad.element_size()
    return ctypes.string_at(grad.data_ptr(), min(_SAMPLE_BYTES, known))
