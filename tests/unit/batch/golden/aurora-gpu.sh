#!/bin/bash -l
#PBS -S /bin/bash
#PBS -N a-run-with-a-lo
#PBS -j oe
#PBS -A proj1
#PBS -q prod
#PBS -l select=2
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:flare
#PBS -k doe

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    exit 2
}

# a-run-with-a-long-name on aurora/gpu: 2 x 12 ranks (nodes x ranks on each), started by mpiexec
# where the job was rendered: `setup` finds its files by relative paths
cd /work/jobs || fail "the job's folder is not here"
export VIRTUAL_ENV=/work/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
cd /work/jobs || fail "the job's folder is not here" # `setup` may have left it

# the run stops, with a checkpoint, before this moment (seconds since 1970)
HPCZERO_DEADLINE=$(($(date +%s) - SECONDS + 3600)) # SECONDS: since the script began
export HPCZERO_DEADLINE
mpiexec -n 24 --ppn 12 --depth 8 --cpu-bind list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100 bash -c 'gpus=(0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 4.0 4.1 5.0 5.1); rank=$PALS_LOCAL_RANKID; export ZE_AFFINITY_MASK=${gpus[rank % 12]}; exec "$@"' one-gpu python3 -m hpczero run /work/jobs/spec.toml </dev/null
