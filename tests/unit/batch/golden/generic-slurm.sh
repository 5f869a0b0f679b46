#!/bin/bash -l
#SBATCH --job-name=a-run-with-a-long-name
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --export=NONE

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    exit 2
}

# a-run-with-a-long-name on generic/slurm: 2 x 1 ranks (nodes x ranks on each), started by srun
# where the job was rendered: `setup` finds its files by relative paths
cd /work/jobs || fail "the job's folder is not here"
export SLURM_EXPORT_ENV=ALL
export VIRTUAL_ENV=/work/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
cd /work/jobs || fail "the job's folder is not here" # `setup` may have left it

# the run stops, with a checkpoint, before this moment (seconds since 1970)
end=${SLURM_JOB_END_TIME:-} # since Slurm 23.02
[ -n "$end" ] || end=$(timeout 20 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null | xargs -r date +%s -d 2>/dev/null)
HPCZERO_DEADLINE=${end:-$(($(date +%s) - SECONDS + 3600))} # SECONDS: since the script began
export HPCZERO_DEADLINE
srun --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 python3 -m hpczero run /work/jobs/spec.toml </dev/null
