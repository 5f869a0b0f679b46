#!/bin/bash -l
#SBATCH --job-name=a-run-with-a-long-name
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=6
#SBATCH --mem=90G
#SBATCH --time=36:30:00
#SBATCH --account=proj_1
#SBATCH --partition=long
#SBATCH --qos=high
#SBATCH --constraint=gpu&ib
#SBATCH --reservation=course
#SBATCH --exclude=n[01-03]
#SBATCH --dependency=afterany:4711
#SBATCH --begin=now+1hour
#SBATCH --mail-user=ada@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --export=WANDB_MODE,HTTPS_PROXY
#SBATCH --exclusive
#SBATCH --licenses=scratch:1

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    exit 2
}

# a-run-with-a-long-name on generic/slurm: 3 x 4 ranks (nodes x ranks on each), started by srun
# where the job was rendered: `setup` finds its files by relative paths
cd /work/jobs || fail "the job's folder is not here"
module load gcc/13 openmpi/5 || fail "these modules cannot be loaded:" gcc/13 openmpi/5
export SLURM_EXPORT_ENV=ALL
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
end=${SLURM_JOB_END_TIME:-} # since Slurm 23.02
[ -n "$end" ] || end=$(timeout 20 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null | xargs -r date +%s -d 2>/dev/null)
HPCZERO_DEADLINE=${end:-$(($(date +%s) - SECONDS + 131400))} # SECONDS: since the script began
export HPCZERO_DEADLINE
srun --kill-on-bad-exit=1 --nodes=3 --ntasks=12 --ntasks-per-node=4 --cpus-per-task=6 --cpu-bind=map_cpu:0,8 --mpi=pmi2 python3 -m hpczero run /work/jobs/spec.toml </dev/null
