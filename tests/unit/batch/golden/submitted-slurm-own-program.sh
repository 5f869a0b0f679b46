#!/bin/bash -l
#SBATCH --job-name=a-run-with-a-long-name
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --export=NONE

# shellcheck disable=SC2016 # what stands in single quotes is meant as it stands
fail() {
    echo "hpczero job: $*" >&2
    [ -e "$hpczero_books/over" ] || echo "$*" >"$hpczero_books/over" # no job after this one does better
    exit 2
}

# a-run-with-a-long-name on generic/slurm: 1 x 1 ranks (nodes x ranks on each), started by srun
# (a prefix, since batch.env and batch.setup may set any other variable)
hpczero_run=/work/jobs/runs/a-run
hpczero_books=/work/jobs/runs/a-run/batch/1-ab
hpczero_job=$SLURM_JOB_ID
note() { # EVENT DETAIL
    echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $hpczero_job $1 $2" >>"$hpczero_books/links"
}
newest() { # checkpoint of the run
    local found=none one
    for one in "$hpczero_run"/checkpoints/step-*/MANIFEST.json; do
        [ ! -e "$one" ] || found=$(basename "$(dirname "$one")")
    done
    echo "$found"
}

# a job of the chain before this one may have left nothing to do
touch "$hpczero_books/links" || fail "$hpczero_books cannot be written"
before=$(newest)
stalled=$(awk -v now="$before" '$3 == "began" { jobs = $4 == now ? jobs + 1 : 0 } END { print jobs + 0 }' "$hpczero_books/links")
if [ ! -e "$hpczero_books/over" ] && [ "$stalled" -ge 3 ]; then
    echo "no progress: $stalled jobs in a row ended without a new checkpoint" >"$hpczero_books/over"
fi
if [ -e "$hpczero_books/over" ]; then
    echo "hpczero job: nothing is left to do: $(cat "$hpczero_books/over")"
    note passed 0
    exit 0
fi
# the jobs before this one have ended, and so has what this one did before it was requeued: a lock that names one of them is nobody's
holder=$(sed -n 's/.*"job": "\([^"]*\)".*/\1/p' "$hpczero_run/lock" 2>/dev/null)
if [ -n "$holder" ] && grep -qF " $holder began " "$hpczero_run"/batch/*/links; then
    rm -f "$hpczero_run/lock"
fi
note began "$before" || fail "$hpczero_books/links cannot be written"
trap 'note ended "${hpczero_code:-$?}"' EXIT
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
# asked to stop, the job asks the run, and waits for it to save and end
trap 'touch "$hpczero_run/stop" 2>/dev/null' TERM USR2
rm -f "$hpczero_books/code" "$hpczero_books/wrong"
export HPCZERO_WRONG_INPUT="$hpczero_books/wrong" # a rank notes there that the input is wrong
{
    trap : TERM USR2
    srun --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1 python 'my train.py' /work/jobs/spec.toml '--note=it'"'"'s $HOME' '{other}' </dev/null
    echo $? >"$hpczero_books/code" # bash may forget what it waited for when a signal comes at the same moment
} &
ranks=$!
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
done
hpczero_code=$(cat "$hpczero_books/code")
hpczero_code=${hpczero_code:-137}
# a launcher may tell how it ended the ranks instead of how the run ended
[ ! -e "$hpczero_books/wrong" ] || hpczero_code=2
if [ "$hpczero_code" -ne 2 ] && [ "$hpczero_run/summary.json" -nt "$hpczero_books/links" ]; then
    ! grep -q '"state": "finished"' "$hpczero_run/summary.json" || hpczero_code=0
    ! grep -q '"state": "stopped"' "$hpczero_run/summary.json" || hpczero_code=75
fi
case $hpczero_code in
0) echo "the run is finished" >"$hpczero_books/over" ;;
2) echo "the input is wrong (exit code 2)" >"$hpczero_books/over" ;;
75) exit 0 ;; # stopped with a checkpoint: the next job goes on
esac
exit "$hpczero_code"
