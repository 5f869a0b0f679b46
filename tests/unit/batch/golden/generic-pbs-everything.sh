#!/bin/bash -l
#PBS -S /bin/bash
#PBS -N a-run-with-a-lo
#PBS -j oe
#PBS -A proj_1
#PBS -q long
#PBS -W depend=afterany:4711
#PBS -a 202601311200
#PBS -M ada@example.org
#PBS -m ae
#PBS -v WANDB_MODE,HTTPS_PROXY
#PBS -l select=3:ncpus=24:mpiprocs=4:mem=90GB:system=fast
#PBS -l place=scatter:excl
#PBS -l walltime=36:30:00
#PBS -l filesystems=home:eagle
#PBS -k doe
#PBS -r n

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    exit 2
}

# a-run-with-a-long-name on generic/pbs: 3 x 4 ranks (nodes x ranks on each), started by mpirun
# where the job was rendered: `setup` finds its files by relative paths
cd /work/jobs || fail "the job's folder is not here"
module load gcc/13 openmpi/5 || fail "these modules cannot be loaded:" gcc/13 openmpi/5
export NOTE='it'"'"'s $HOME'
export OMP_PROC_BIND=close
export VIRTUAL_ENV='/work/my venv'
export PATH="$VIRTUAL_ENV/bin:$PATH"
set -e
ulimit -s unlimited
echo "on $(hostname)"
set +e
cd /work/jobs || fail "the job's folder is not here" # `setup` may have left it

# the run stops, with a checkpoint, before this moment (seconds since 1970)
HPCZERO_DEADLINE=$(($(date +%s) - SECONDS + 131400)) # SECONDS: since the script began
export HPCZERO_DEADLINE
mpirun -n 12 --bind-to none python3 -m hpczero run /work/jobs/spec.toml </dev/null
