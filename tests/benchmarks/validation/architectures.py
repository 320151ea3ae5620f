"""Traces of published models for which no trace is at hand, built from their architecture.

Sizes are exact. Times are operation counts, as those of most example traces: a
multiplication with its addition counts 1, an element through batch normalisation 36 (memory
traffic, not arithmetic, decides there), backward twice forward, and all is scaled to a measured
compute time. Of a weight and its bias the weight is used first and its gradient appears last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec

NORM_COST = 36


@dataclass
class Builder:
    """Collects layers in forward order; times in operations until they are scaled."""

    tensors: list[TraceTensor] = field(default_factory=list)

    def conv(self, inputs: int, outputs: int, kernel: int, image: int) -> None:
        """A convolution without bias; ``image`` is the edge of its output."""
        numel = inputs * outputs * kernel**2
        self._add(numel, numel * image**2, 2 * numel * image**2)

    def norm(self, channels: int, image: int) -> None:
        """Batch normalisation with scale and shift."""
        operations = NORM_COST * channels * image**2
        self._add(channels, operations, 0)
        self._add(channels, 0, 2 * operations)

    def linear(self, inputs: int, outputs: int) -> None:
        """A fully connected layer with bias."""
        self._add(inputs * outputs, inputs * outputs, 0)
        self._add(outputs, 0, 2 * inputs * outputs)

    def _add(self, numel: int, forward: float, backward: float) -> None:
        spec = TensorSpec(f"t{len(self.tensors)}", (numel,), "float32")
        self.tensors.append(TraceTensor(spec, forward, backward))

    def trace(self, model: str, compute_s: float) -> Trace:
        """All layers so far, scaled to ``compute_s`` of forward and backward."""
        return scaled(Trace(model, tuple(self.tensors)), compute_s)


def scaled(trace: Trace, compute_s: float) -> Trace:
    """The trace with forward and backward taking ``compute_s`` together."""
    factor = compute_s / (trace.forward_s + trace.backward_s)
    rows = (
        replace(t, forward_s=t.forward_s * factor, backward_s=t.backward_s * factor)
        for t in trace.tensors
    )
    return replace(trace, tensors=tuple(rows))


def resnet(blocks: tuple[int, int, int, int], model: str, compute_s: float) -> Trace:
    """A bottleneck ResNet whose 3 x 3 convolutions stride (He et al., CVPR 2016), 224 x 224."""
    net = Builder()
    net.conv(3, 64, 7, 112)
    net.norm(64, 112)
    inputs, before = 64, 56
    for stage, count in enumerate(blocks):
        width, image = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            net.conv(inputs, width, 1, before)
            net.norm(width, before)
            net.conv(width, width, 3, image)
            net.norm(width, image)
            net.conv(width, 4 * width, 1, image)
            net.norm(4 * width, image)
            if block == 0:
                net.conv(inputs, 4 * width, 1, image)
                net.norm(4 * width, image)
            inputs, before = 4 * width, image
    net.linear(inputs, 1000)
    return net.trace(model, compute_s)


def densenet(
    growth: int, channels: int, blocks: tuple[int, int, int, int], model: str, compute_s: float
) -> Trace:
    """A DenseNet-BC (Huang et al., CVPR 2017), 224 x 224."""
    net = Builder()
    net.conv(3, channels, 7, 112)
    net.norm(channels, 112)
    image = 56
    for stage, count in enumerate(blocks):
        for _ in range(count):
            net.norm(channels, image)
            net.conv(channels, 4 * growth, 1, image)
            net.norm(4 * growth, image)
            net.conv(4 * growth, growth, 3, image)
            channels += growth
        net.norm(channels, image)
        if stage < 3:
            net.conv(channels, channels // 2, 1, image)
            channels, image = channels // 2, image // 2
    net.linear(channels, 1000)
    return net.trace(model, compute_s)
