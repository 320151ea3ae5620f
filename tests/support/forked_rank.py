"""A rank of an MPI job whose program runs in a fork of a server (``fork_server.py``).

Usage: mpirun -n N python -I -S forked_rank.py FOLDER SCRIPT ARGUMENT ..., where the server of rank
R listens at FOLDER/(R modulo 2). It ends as the program does. Imports little, so that it starts at
once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys


def main() -> None:
    folder, *arguments = sys.argv[1:]
    environment = dict(os.environ)
    rank = int(environment.get("PMI_RANK") or environment["OMPI_COMM_WORLD_RANK"])
    descriptors = [0, 1, 2]
    if "PMI_FD" in environment:  # MPICH's connection to its launcher
        descriptors.append(int(environment["PMI_FD"]))
    job = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    text = json.dumps(job).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}/{rank % 2}")
        socket.send_fds(server, [struct.pack("I", len(text))], descriptors)
        server.sendall(text)
        (code,) = struct.unpack("i", server.recv(4))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
