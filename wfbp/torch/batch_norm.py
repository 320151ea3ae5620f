"""Batch normalisation by the statistics of all ranks' batches.

Forward gathers every rank's count, mean and sum of squared differences from it, and combines them
(Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983). This loses no
digits if the mean is large. A sum over ranks gathers them, because PyTorch differentiates it: the
gradient of a sum is the sum of all ranks' gradients. The gradients of weight and bias are this
rank's own, as those of every other parameter before they are averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from wfbp.core.types import Op
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.runtime import Runtime
from wfbp.torch.collectives import allreduce
from wfbp.torch.compiling import uncompiled


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.SyncBatchNorm``, over all ranks of wfbp and without a process group.

    Every rank must run the same of these layers, in the same order, whenever it trains; a rank's
    batch may be empty. The statistics travel once per forward and once per backward, through the
    memory of the host: if batches are large enough, ``torch.nn.BatchNorm2d`` is faster.

    Args:
        num_features: size of the inputs' second dimension; like the following, as of
            ``torch.nn.BatchNorm2d``.
        eps: added to the variance.
        momentum: of the running statistics.
        affine: whether there are weights and biases.
        track_running_stats: whether there are running statistics.
        process_set: the ranks whose batches are one.

    Raises:
        ValueError: in forward: an input of another shape, or fewer than two values per channel
            on all ranks together.
        NotInitializedError: in forward, before ``wfbp.init()``.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> layer = wfbp.SyncBatchNorm(3)
        >>> layer(torch.randn(8, 3, 5)).shape
        torch.Size([8, 3, 5])
    """

    process_set = global_process_set

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        if process_set is not global_process_set:
            self.process_set = process_set

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        """The input, normalised."""
        self._check_input_dim(input)
        runtime = api.runtime_of(self.process_set, "SyncBatchNorm")
        if not self.training or runtime.size == 1:
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()  # sums are kept in this type
        others = [0, *range(2, x.dim())]
        own_count = x.numel() // x.shape[1]
        own_mean = x.sum(others) / max(own_count, 1)
        offset = own_mean.detach()  # in backward a constant, because no result depends on it
        centered = x - _along(offset, x)
        own_squares = (centered * centered).sum(others)
        mean, squares, count = _combined(
            own_mean, own_squares, own_count, runtime, self.process_set
        )
        # Looked at where it may be: on a device the host would wait for it.
        if own_count <= 1 and count <= 1:
            raise ValueError(
                "SyncBatchNorm: expected more than one value per channel on all ranks together, "
                f"found {int(count)}"
            )
        if self.track_running_stats:
            self._track(mean, squares / (count - 1))
        scale = torch.rsqrt(squares / count + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = (offset - mean) * scale
        if self.bias is not None:
            shift = shift + self.bias
        return torch.addcmul(_along(shift, x), centered, _along(scale, x)).to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected an input of shape (N, {self.num_features}, ...), found "
                f"{tuple(input.shape)}"
            )

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics on; PyTorch keeps the unbiased variance."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            share: Any = self.momentum
            if share is None:  # a plain average of all batches
                share = 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """A model whose layers of batch normalisation are these; parameters are kept.

        Args:
            module: changed in place.
            process_set: the ranks whose batches are one.

        Example:
            >>> import torch, wfbp.torch as wfbp
            >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
            >>> type(wfbp.SyncBatchNorm.convert_sync_batchnorm(model)[0]).__name__
            'SyncBatchNorm'
        """
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, cls):
                layer.__class__ = cls  # its parameters, buffers and settings have the same names
                if process_set is not global_process_set:
                    vars(layer)["process_set"] = process_set
        return module


def _combined(
    mean: torch.Tensor, squares: torch.Tensor, count: int, runtime: Runtime, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all ranks, per channel the mean and the sum of squared differences, and the count."""
    # Not new_tensor(), which would let the host wait for a device; counts need the digits.
    own = mean.new_full((1,), count, dtype=torch.float64)
    table = own.new_zeros(runtime.size, 2 * len(mean) + 1)
    table[runtime.rank] = torch.cat([mean.double(), squares.double(), own])
    table = allreduce(table, op=Op.SUM, process_set=process_set)
    counts = table[:, -1:].detach()
    means, of_ranks = table[:, :-1].chunk(2, dim=1)
    total = counts.sum()
    mean_of_all = (counts * means).sum(0) / total
    between = counts * (means - mean_of_all).square()
    return mean_of_all.to(mean.dtype), (of_ranks + between).sum(0).to(mean.dtype), total


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per channel, in a shape that meets the input's."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
