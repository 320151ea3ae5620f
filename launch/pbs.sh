#!/bin/bash
# A training job under PBS: qsub -v PROGRAM="train.py --epochs 10" launch/pbs.sh
#PBS -N wfbp
#PBS -l select=2:ncpus=16:mpiprocs=4
#PBS -j oe
set -euo pipefail
cd "$PBS_O_WORKDIR"

environment="${VENV:-.venv}"
# Hosts and ranks are those of $PBS_NODEFILE; the program's words are split at spaces.
# shellcheck disable=SC2086
exec "$environment/bin/wfbprun" ${PROGRAM:?give the program: qsub -v PROGRAM=train.py}
