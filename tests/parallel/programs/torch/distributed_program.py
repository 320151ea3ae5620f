"""Every check of the backend of torch.distributed: ``distributed_program.py OUT MODE [NAME ...]``.

Run under mpirun.
"""

from __future__ import annotations

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import process_group_frameworks, process_groups

check = Checks(process_groups.check, process_group_frameworks.check)

if __name__ == "__main__":
    check.main()
