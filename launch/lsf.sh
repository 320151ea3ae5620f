#!/bin/bash
# A training job under LSF: PROGRAM="train.py --epochs 10" bsub < launch/lsf.sh
#BSUB -J wfbp
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -o wfbp-%J.log
set -euo pipefail

environment="${VENV:-.venv}"
# Hosts and ranks are those of LSF; the program's words are split at spaces.
# shellcheck disable=SC2086
exec "$environment/bin/wfbprun" ${PROGRAM:?give the program: PROGRAM=train.py bsub < launch/lsf.sh}
