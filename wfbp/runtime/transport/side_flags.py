"""What ranks say of a step beside its gradients, where these lie on a device.

In the host's memory the flags of a step travel behind the gradients (``flags``). On a device
reading them would make the host wait for it in every step. So they travel on their own, through
the host, in one small all-reduce that is started when the step's last group leaves: hosts run ahead
of their devices, and its latency hides behind what these still have to do.
"""

from __future__ import annotations

import numpy as np

from wfbp.comm.backend import Backend, Work
from wfbp.core.plan import Plan
from wfbp.core.types import Op
from wfbp.runtime.steps import Step
from wfbp.runtime.transport.flags import NUM_STEP_FLAGS, GroupFlags, step_flags


class HostFlags:
    """The flags of all tensors of a plan. Used in turns.

    Args:
        plan: what is sent.
        host: carries them.
    """

    def __init__(self, plan: Plan, host: Backend) -> None:
        self._host = host
        self._tensors = range(len(plan.tensors))
        self._message = np.zeros(len(plan.tensors) + NUM_STEP_FLAGS, np.uint8)

    def send(self, step: Step) -> Work[None]:
        """Tell the other ranks of a step that is closed."""
        border = [step.requested, step.discards, *step_flags(step.number)]
        self._message[:] = [bool(address) for address in step.addresses] + border
        return self._host.all_reduce(self._message, "uint8", Op.MAX)

    def read(self, number: int) -> GroupFlags:
        """What any rank has said."""
        flags = self._message > 0
        requested, discarded, *steps = flags[len(self._tensors) :].tolist()
        agree = steps == [flag > 0 for flag in step_flags(number)]
        present = flags[: len(self._tensors)].tolist()
        return GroupFlags(present, requested, discarded, agree, self._tensors)
