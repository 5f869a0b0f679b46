#!/bin/bash -l
#PBS -S /bin/bash
#PBS -N a-run-with-a-lo
#PBS -j oe
#PBS -A proj1
#PBS -q prod
#PBS -l select=10:system=polaris
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:eagle

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    exit 2
}

# a-run-with-a-long-name on polaris/gpu: 10 x 4 ranks (nodes x ranks on each), started by mpiexec
# where the job was rendered: `setup` finds its files by relative paths
cd /work/jobs || fail "the job's folder is not here"
export VIRTUAL_ENV=/work/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
cd /work/jobs || fail "the job's folder is not here" # `setup` may have left it

# the run stops, with a checkpoint, before this moment (seconds since 1970)
HPCZERO_DEADLINE=$(($(date +%s) - SECONDS + 3600)) # SECONDS: since the script began
export HPCZERO_DEADLINE
mpiexec -n 40 --ppn 4 --depth 16 --cpu-bind depth bash -c 'gpus=(3 2 1 0); rank=$PALS_LOCAL_RANKID; export CUDA_VISIBLE_DEVICES=${gpus[rank % 4]}; exec "$@"' one-gpu python3 -m hpczero run /work/jobs/spec.toml </dev/null
