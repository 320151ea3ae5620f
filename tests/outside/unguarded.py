"""A script without ``if __name__ == "__main__"``, with a spawned worker and a child of its own."""

import multiprocessing
import subprocess
import sys

import torch

import wfbp.torch as wfbp

wfbp.init()
worker = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
worker.start()
worker.join()
CHILD = "import wfbp, torch; wfbp.init()"
child = subprocess.run([sys.executable, "-c", CHILD], check=False, timeout=100)
total = wfbp.allreduce(torch.ones(1), op=wfbp.Sum)
print([worker.exitcode, child.returncode], total.item(), flush=True)
