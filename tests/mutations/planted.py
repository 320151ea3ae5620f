"""The defects: a flipped comparison, a dropped wait, a wrong index, a forgotten case.

Each stands for a mistake that somebody could make; its tests are the nearest ones that should
notice it, not all that do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One defect.

    Args:
        path: of the file, in the package.
        old: what stands there, once.
        new: what stands there instead.
        tests: arguments of pytest: the tests that fail then, or run into their time limit.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def unit(*files: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/{file}.py" for file in files)


CORE = [
    Mutation(
        "runtime/tuning/trial.py",
        "median(slower) > MARGIN",
        "median(slower) > -MARGIN",
        unit("runtime/test_trial"),
    ),
    Mutation(
        "core/plan.py",
        "self.num_backward - 1 if self.overlap else 0",
        "self.num_backward if self.overlap else 0",
        unit("core/test_sequencer"),
    ),
    Mutation(
        "core/sequencer.py",
        "if self._gathers_started < self._gathers_ready:",
        "if self._gathers_started <= self._gathers_ready:",
        unit("core/test_sequencer_gathers"),
    ),
    Mutation(
        "core/sequencer.py",
        "if self._completed == self._num_backward and self._gathers_completed",
        "if self._completed == self._num_backward and self._num_gathers",
        unit("core/test_sequencer_gathers"),
    ),
    Mutation(
        "core/timeline.py",
        "left_s[min(group.tensors)]",
        "left_s[max(group.tensors)]",
        unit("core/test_timeline"),
    ),
    Mutation(
        "core/timeline.py",
        "ready_s = max(ready_clock[k] for",
        "ready_s = min(ready_clock[k] for",
        unit("core/test_timeline"),
    ),
    Mutation(
        "core/cost.py",
        "((nbytes - size) / (next_size - size))",
        "((next_size - nbytes) / (next_size - size))",
        unit("core/test_cost"),
    ),
    Mutation(
        "core/fit.py",
        "weights = np.minimum(1.0, limit",
        "weights = np.maximum(1.0, limit",
        unit("core/test_fit"),
    ),
    Mutation(
        "core/planners/baselines.py",
        "if held >= threshold_bytes or",
        "if held > threshold_bytes or",
        unit("core/test_planners"),
    ),
    Mutation(
        "core/planners/baselines.py",
        "or ready[k] - start < alpha)",
        "or ready[k] - start > alpha)",
        unit("core/test_planners"),
    ),
    Mutation(
        "core/planners/optimum.py",
        "if bound >= finish_s(best, lag) - slack:",
        "if bound <= finish_s(best, lag) - slack:",
        unit("core/test_planners_oasr"),
    ),
    Mutation(
        "core/planners/hybrid.py",
        "after = np.maximum(g, left_s[j]",
        "after = np.minimum(g, left_s[j]",
        unit("core/test_planners_hybrid"),
    ),
    Mutation(
        "core/planners/partition.py",
        "row.ready_s[end - 1]) + speed",
        "row.ready_s[start]) + speed",
        unit("core/test_planners_oasr", "core/test_planners_decoupled"),
    ),
]

RUNTIME = [
    Mutation(
        "runtime/gathers.py",
        "while self._num_arrived <= min(group, ",
        "while self._num_arrived < min(group, ",
        unit("runtime/test_reducer"),
    ),
    Mutation(
        "runtime/gathers.py",
        "        self.flush()\n        self._clock.waits, self._clock.gathers = [], []",
        "        self._clock.waits, self._clock.gathers = [], []",
        unit("runtime/test_reducer"),
    ),
    Mutation(
        "runtime/buffers.py",
        "flags: list[bool] = (reduced > 0).tolist()",
        "flags: list[bool] = (reduced > 0.5).tolist()",
        unit("runtime/test_reductions", "runtime/test_buffers"),
    ),
    Mutation(
        "runtime/buffers.py",
        "agree = in_cycle == [",
        "agree = in_cycle >= [",
        unit("runtime/test_reduction_errors", "runtime/test_mistakes", "runtime/test_buffers"),
    ),
    Mutation(
        "runtime/reducer.py",
        "            if left < 0:\n",
        "            if left < -1:\n",
        unit("runtime/test_reducer"),
    ),
    Mutation(
        "runtime/reducer.py",
        "        whole = result.whole\n",
        "",
        unit("runtime/test_decoupled_reductions"),
    ),
    Mutation(
        "runtime/progress/fetching.py",
        "if store is not None and store.published is not published:",
        "if store is None:",
        unit("runtime/test_fetching"),
    ),
    Mutation(
        "runtime/reducer.py",
        "if owner != index and specs[index].numel:",
        "if owner == index and specs[index].numel:",
        unit("runtime/test_reductions"),
    ),
    Mutation(
        "runtime/reducer.py",
        "        if not self._may_have_left(index):\n",
        "        if True:\n",
        unit("runtime/test_reducer"),
    ),
    Mutation(
        "runtime/tuning/tuner.py",
        "self._num_drifted >= _DRIFT_WINDOWS",
        "self._num_drifted > _DRIFT_WINDOWS",
        unit("runtime/test_tuner"),
    ),
    Mutation(
        "runtime/tuning/tuner.py",
        'self.trace = self._measured.slower(answer["slowdown"])',
        "self.trace = self._measured",
        unit("runtime/test_tuner"),
    ),
    Mutation(
        "runtime/measuring.py",
        "if self.left < (self.steps.maxlen or 0):",
        "if self.left > (self.steps.maxlen or 0):",
        unit("runtime/test_tuner"),
    ),
    Mutation(
        "runtime/tuning/tuner.py",
        "[max(times) for times in zip(*ranks, strict=True)]",
        "[min(times) for times in zip(*ranks, strict=True)]",
        unit("runtime/test_tuner"),
    ),
    Mutation(
        "runtime/tuning/trial.py",
        "for plan in reversed(self.plans) if plan in kept",
        "for plan in self.plans if plan in kept",
        unit("runtime/test_trial"),
    ),
    Mutation(
        "runtime/tuning/profile.py",
        "max(t if t >= 0 else closed_s for t in times)",
        "min(t if t >= 0 else closed_s for t in times)",
        unit("runtime/test_profile"),
    ),
    Mutation(
        "runtime/named/named_lane.py",
        "start = sum(numels[: self._data.rank])",
        "start = sum(numels[: self._data.rank + 1])",
        unit("runtime/test_named_operations"),
    ),
    Mutation(
        "runtime/named/coordinator.py",
        "if len(requests) + len(absent) == self._size:",
        "if len(requests) == self._size:",
        unit("runtime/test_named_operations"),
    ),
    Mutation(
        "runtime/buffers.py",
        "            self._make_way(sources)\n",
        "            pass\n",
        unit("runtime/test_reductions", "runtime/test_buffers"),
    ),
    Mutation(
        "runtime/buffers.py",
        "min((rank + 1) * length, spec.nbytes)",
        "(rank + 1) * length",
        unit("runtime/test_decoupled_reductions", "runtime/test_buffers"),
    ),
    Mutation(
        "runtime/progress/channel.py",
        "if not all(letter.startswith(digest)",
        "if not any(letter.startswith(digest)",
        unit("runtime/test_channel"),
    ),
    Mutation(
        "runtime/lane.py",
        "if sequencer.reduced:  # this begins",
        "if sequencer.reduced and not sequencer.gathering:  # this begins",
        unit("runtime/test_lane"),
    ),
]

COMM = [
    Mutation(
        "comm/mpi/transfers.py",
        "max(1, -(-numel * item_bytes // chunk_bytes))",
        "max(1, numel * item_bytes // chunk_bytes)",
        unit("comm/test_comm_parts"),
    ),
    Mutation(
        "comm/mpi/two_level.py",
        "if any(words[self._row] < needed",
        "if all(words[self._row] < needed",
        unit("comm/test_two_level"),
    ),
    Mutation(
        "comm/mpi/two_level.py",
        "return all(self._reached(peer, phase) for peer in self._flags.peers)",
        "return any(self._reached(peer, phase) for peer in self._flags.peers)",
        unit("comm/test_two_level"),
    ),
    Mutation(
        "comm/mpi/two_level.py",
        "if not self._all_reached(TAKEN):",
        "if False:",
        unit("comm/test_two_level"),
    ),
    Mutation(
        "comm/waiting.py",
        "if waited_s < SPIN_S and",
        "if waited_s > SPIN_S and",
        unit("comm/test_waiting"),
    ),
    Mutation(
        "comm/device/staged.py",
        "if not self.device.done(piece.copied):",
        "if False:",
        unit("comm/test_device_backends"),
    ),
    Mutation(
        "comm/device/staged.py",
        "others = [not mine for mine in own]",
        "others = own",
        unit("comm/test_device_backends"),
    ),
    Mutation(
        "comm/device/device_backend.py",
        "self.device.wait(self.stream, packed)",
        "pass",
        ("tests/unit/runtime/test_device_reductions.py", "-k", "host_waits_for_nothing"),
    ),
    Mutation(
        "comm/device/device_backend.py",
        "order.last[0] != self.lane",
        "False",
        unit("comm/test_device_backends"),
    ),
    Mutation(
        "comm/device/launch_order.py",
        "        while self._turns and left[self._turns[0]]:",
        "        while self._turns and sum(left):",
        unit("comm/test_launch_order"),
    ),
]

TORCH = [
    Mutation(
        "torch/gradient_sync.py",
        "elif grad._version != version and",
        "elif grad._version < version and",
        unit("torch/test_gradient_guard"),
    ),
    Mutation(
        "torch/pending.py",
        "for k, number in self._left.items() if number <= last]",
        "for k in self._left]",
        unit("torch/test_pending"),
    ),
    Mutation(
        "torch/pending.py",
        "set(map(_storage_uses, self._storages)) != {_USES_OF_TWO}",
        "max(map(_storage_uses, self._storages)) > _USES_OF_TWO + 9",
        unit("torch/test_pending"),
    ),
    Mutation(
        "torch/pending.py",
        "            if index not in self._left:  # a",
        "            if False:  # a",
        ("tests/parallel/test_signals.py", "-k", "2-mpich and read"),
    ),
    Mutation(
        "torch/clipping.py",
        "if channel is None or runtime.rank == 0:",
        "if True:",
        ("tests/parallel/test_torch.py", "-k", "clipping and 2-overlap"),
    ),
    Mutation(
        "torch/batch_norm.py",
        "between = counts * (means - mean_of_all).square()",
        "between = (means - mean_of_all).square()",
        ("tests/parallel/test_torch.py", "-k", "norm and 2-overlap"),
    ),
    Mutation(
        "torch/updates.py",
        "{k: targets.pop(k) for k in early if k in targets}",
        "{k: targets[k] for k in early if k in targets}",
        ("tests/parallel/test_torch.py", "-k", "held and 2-ps_layerwise"),
    ),
    Mutation(
        "torch/state_sharding.py",
        "start = sum(self._counts[index][:rank])",
        "start = sum(self._counts[index][: max(rank - 1, 0)])",
        ("tests/parallel/test_decoupled.py", "-k", "test_state and 3-mixed"),
    ),
]

JAX = [
    Mutation(
        "jax/gradients.py",
        "for place, value in zip(self.places, averages, strict=True):",
        "for place, value in enumerate(averages):",
        unit("jax/test_trees"),
    ),
    Mutation(
        "jax/gradients.py",
        "-len(args) <= number < len(args)",
        "-len(args) <= number <= len(args)",
        unit("jax/test_arguments"),
    ),
    Mutation(
        "jax/gradient_exchange.py",
        "if self._addresses[index] or self._closing:",
        "if self._closing:",
        unit("jax/test_gradient_exchange"),
    ),
    Mutation(
        "runtime/reducer.py",
        "group if group < self._num_early else -1",
        "group if group <= self._num_early else -1",
        unit("runtime/test_reducer"),
    ),
    Mutation(
        "jax/trees.py",
        "mean[start:end].reshape",
        "mean[: end - start].reshape",
        ("tests/parallel/test_jax_operations.py", "-k", "metrics and 3-overlap"),
    ),
]

ALL = {"core": CORE, "runtime": RUNTIME, "comm": COMM, "torch": TORCH, "jax": JAX}
