"""Passes on how training goes: to TensorBoard, to Prometheus, to a progress bar.

What is passed on is ``optimizer.stats()``, ``reducer.stats()`` or ``wfbp.jax.stats()``. One rank is
enough, as times are much the same on all; rank 0 by custom.

Example:
    >>> from wfbp import monitoring
    >>> stats = {"iteration": 10, "iteration_s": 0.025, "plan": "oasr, 4 groups", "phase": "trial"}
    >>> print(monitoring.prometheus_text(stats, job="mlp"))
    # HELP wfbp_iterations_total Iterations so far.
    # TYPE wfbp_iterations_total counter
    wfbp_iterations_total{job="mlp"} 10
    # HELP wfbp_iteration_seconds Median time of the last iterations.
    # TYPE wfbp_iteration_seconds gauge
    wfbp_iteration_seconds{job="mlp"} 0.025
    # HELP wfbp_plan_info The plan in use.
    # TYPE wfbp_plan_info gauge
    wfbp_plan_info{job="mlp",phase="trial",plan="oasr, 4 groups"} 1
    <BLANKLINE>
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from wfbp.runtime import process

__all__ = ["TensorBoard", "progress", "prometheus_text", "write_prometheus"]

T = TypeVar("T")
Stats = Mapping[str, Any]
"""Of one optimizer; or of several, by name."""

_METRICS = (
    ("iteration", "wfbp_iterations_total", "counter", "Iterations so far."),
    ("iteration_s", "wfbp_iteration_seconds", "gauge", "Median time of the last iterations."),
    (
        "exposed_s",
        "wfbp_exposed_communication_seconds",
        "gauge",
        "Median time per iteration that training waited for communication.",
    ),
    ("bytes", "wfbp_gradient_bytes", "gauge", "Bytes of gradients per iteration."),
    (
        "ratio_to_lower_bound",
        "wfbp_ratio_to_lower_bound",
        "gauge",
        "Iteration time over what no schedule can beat.",
    ),
    ("predicted_s", "wfbp_predicted_iteration_seconds", "gauge", "What the plan was to take."),
)


class HasStats(Protocol):
    """A distributed optimizer, or a reducer."""

    def stats(self) -> dict[str, Any]:
        """How training goes."""


def prometheus_text(stats: Stats, **labels: str) -> str:
    """Stats in Prometheus' text format.

    Args:
        stats: of one optimizer, or of several by name; these are told apart by the label
            ``optimizer``.
        labels: for every sample.

    Returns:
        The text; empty where there are no stats, as with one rank.
    """
    rows = [(labels | extra, of_one) for extra, of_one in _by_name(stats)]
    lines = []
    for key, metric, kind, help_text in _METRICS:
        samples = [
            f"{metric}{_labels(own)} {of_one[key]!r}"
            for own, of_one in rows
            if of_one.get(key) is not None
        ]
        lines += _family(metric, kind, help_text, samples)
    infos = [
        f"wfbp_plan_info{_labels({**own, 'plan': of_one['plan'], 'phase': of_one['phase']})} 1"
        for own, of_one in rows
    ]
    lines += _family("wfbp_plan_info", "gauge", "The plan in use.", infos)
    return "".join(f"{line}\n" for line in lines)


def write_prometheus(path: str | os.PathLike[str], stats: Stats, **labels: str) -> None:
    """Write stats for the textfile collector of Prometheus' node exporter; whole or not at all.

    Args:
        path: ends in ``.prom``, in the directory that the collector reads.
        stats: as of :func:`prometheus_text`.
        labels: for every sample.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_prometheus(f"{folder}/wfbp.prom", {})
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(prometheus_text(stats, **labels), encoding="utf-8")
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class TensorBoard:
    """Writes stats as scalars for TensorBoard; the extra ``tensorboard`` is needed.

    Used by one thread.

    Args:
        directory: for the event file; made if it does not exist.
        writer: writes instead, as does a ``SummaryWriter`` of the program: PyTorch's or
            tensorboardX's. It is then the program that closes it.

    Raises:
        ImportError: no writer was passed, and the extra is not installed.

    Example:
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step): print(tag, value, step)
        >>> TensorBoard(writer=Printer()).add({"iteration": 7, "iteration_s": 0.5, "plan": "wfbp"})
        wfbp/iteration_s 0.5 7
    """

    def __init__(self, directory: str | os.PathLike[str] = "", *, writer: Any = None) -> None:
        self._own = writer is None
        if writer is None:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "TensorBoard needs tensorboardX: pip install 'wfbp[tensorboard]', or pass the "
                    "writer that the program has"
                ) from error
            writer = SummaryWriter(os.fspath(directory) or None)
        self._writer = writer

    def add(self, stats: Stats) -> None:
        """Write what is known, at the step of the stats."""
        for extra, of_one in _by_name(stats):
            prefix = "/".join(["wfbp", *extra.values()])
            for key, *_ in _METRICS[1:]:
                if of_one.get(key) is not None:
                    self._writer.add_scalar(f"{prefix}/{key}", of_one[key], of_one["iteration"])

    def close(self) -> None:
        """Write what is left, and close the file if it is this one's own."""
        if self._own:
            self._writer.close()
        elif flush := getattr(self._writer, "flush", None):
            flush()


def progress(
    iterable: Iterable[T], optimizer: HasStats | None = None, **options: Any
) -> Iterator[T]:
    """A progress bar on rank 0, plain iteration on the others; the extra ``progress`` is needed.

    Args:
        iterable: of steps or batches.
        optimizer: whose stats are shown at the end of the bar, about once a second.
        options: for ``tqdm``, as ``desc`` and ``total``.

    Raises:
        ImportError: on rank 0; the extra is not installed.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> sum(progress(range(4), disable=True))
        6
    """
    if process.rank() > 0:
        return iter(iterable)
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "progress() needs tqdm on rank 0: pip install 'wfbp[progress]'"
        ) from error
    options.setdefault("mininterval", 1.0)
    bar = tqdm(iterable, **options)
    return iter(bar) if optimizer is None or bar.disable else _shown(bar, optimizer.stats)


def _shown(bar: Any, stats: Callable[[], dict[str, Any]]) -> Iterator[Any]:
    """The bar's items. Stats are asked for only where the bar has just been drawn."""
    drawn = 0.0
    for item in bar:
        if bar.last_print_t != drawn:
            drawn = bar.last_print_t
            bar.set_postfix_str(_postfix(stats()), refresh=False)
        yield item


def _postfix(stats: Stats) -> str:
    """Stats in a few words.

    >>> _postfix({"iteration_s": 0.0251, "exposed_s": 0.002, "plan": "oasr, 4 groups"})
    '25.1 ms, 2.0 ms exposed, oasr, 4 groups'
    """
    parts = []
    if stats.get("iteration_s") is not None:
        parts.append(f"{stats['iteration_s'] * 1e3:.1f} ms")
    if stats.get("exposed_s") is not None:
        parts.append(f"{stats['exposed_s'] * 1e3:.1f} ms exposed")
    return ", ".join([*parts, *([stats["plan"]] if "plan" in stats else [])])


def _by_name(stats: Stats) -> list[tuple[dict[str, str], Stats]]:
    """Each optimizer's stats, with what tells it apart."""
    if not stats:
        return []
    if "iteration" in stats:
        return [({}, stats)]
    return [({"optimizer": name}, of_one) for name, of_one in stats.items()]


def _family(metric: str, kind: str, help_text: str, samples: list[str]) -> list[str]:
    if not samples:
        return []
    return [f"# HELP {metric} {help_text}", f"# TYPE {metric} {kind}", *samples]


def _labels(labels: Mapping[str, str]) -> str:
    """As Prometheus wants them: sorted, quoted, with its three escapes.

    >>> _labels({"b": 'say "x"', "a": "1"})
    '{a="1",b="say \\\\"x\\\\""}'
    """
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{escaped[name]}"' for name in sorted(escaped)) + "}"
