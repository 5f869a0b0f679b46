#!/bin/bash -l
#PBS -S /bin/bash
#PBS -N a-run-with-a-lo
#PBS -j oe
#PBS -P proj1
#PBS -q rt_HF
#PBS -l select=2:mpiprocs=8
#PBS -l walltime=01:00:00

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    exit 2
}

# a-run-with-a-long-name on abci/full: 2 x 8 ranks (nodes x ranks on each), started by mpirun
# where the job was rendered: `setup` finds its files by relative paths
cd /work/jobs || fail "the job's folder is not here"
module load hpcx || fail "these modules cannot be loaded:" hpcx
export VIRTUAL_ENV=/work/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
cd /work/jobs || fail "the job's folder is not here" # `setup` may have left it

# the run stops, with a checkpoint, before this moment (seconds since 1970)
HPCZERO_DEADLINE=$(($(date +%s) - SECONDS + 3600)) # SECONDS: since the script began
export HPCZERO_DEADLINE
mpirun -n 16 --bind-to none python3 -m hpczero run /work/jobs/spec.toml </dev/null
