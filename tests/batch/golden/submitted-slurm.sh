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
run=/work/jobs/runs/a-run
books=/work/jobs/runs/a-run/batch/1-ab
me=$SLURM_JOB_ID
note() { # EVENT DETAIL
    echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $me $1 $2" >>"$books/links"
}
newest() { # checkpoint of the run
    local found=none one
    for one in "$run"/checkpoints/step-*/MANIFEST.json; do
        [ ! -e "$one" ] || found=$(basename "$(dirname "$one")")
    done
    echo "$found"
}

# a job of the chain before this one may have left nothing to do
touch "$books/links" || fail "$books cannot be written"
before=$(newest)
stalled=$(awk -v now="$before" '$3 == "began" { jobs = $4 == now ? jobs + 1 : 0 } END { print jobs + 0 }' "$books/links")
if [ ! -e "$books/over" ] && [ "$stalled" -ge 2 ]; then
    echo "no progress: $stalled jobs in a row ended without a new checkpoint" >"$books/over"
fi
if [ -e "$books/over" ]; then
    echo "hpczero job: nothing is left to do: $(cat "$books/over")"
    note passed 0
    exit 0
fi
note began "$before"
trap 'note ended "${code:-$?}"' EXIT
export SLURM_EXPORT_ENV=ALL
export VIRTUAL_ENV=/work/venv
export PATH="$VIRTUAL_ENV/bin:$PATH"
cd /work/jobs || fail "the job's folder is not here"

# the run stops, with a checkpoint, before this moment (seconds since 1970)
end=${SLURM_JOB_END_TIME:-} # since Slurm 23.02
[ -n "$end" ] || end=$(timeout 20 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null | xargs -r date +%s -d 2>/dev/null)
HPCZERO_DEADLINE=${end:-$(($(date +%s) + 3600))}
export HPCZERO_DEADLINE
# asked to stop, the job asks the run, and waits for it to save and end
trap 'touch "$run/stop" 2>/dev/null' TERM USR2
srun --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 python3 -m hpczero run /work/jobs/spec.toml </dev/null &
ranks=$!
while :; do
    wait "$ranks"
    code=$?
    kill -0 "$ranks" 2>/dev/null || break
done
# a launcher may tell how it ended the ranks instead of how the run ended
if [ "$code" -gt 2 ] && [ "$run/summary.json" -nt "$books/links" ]; then
    ! grep -q '"state": "finished"' "$run/summary.json" || code=0
    ! grep -q '"state": "stopped"' "$run/summary.json" || code=75
fi
case $code in
0) echo "the run is finished" >"$books/over" ;;
2) echo "the input is wrong (exit code 2)" >"$books/over" ;;
75) exit 0 ;; # stopped with a checkpoint: the next job goes on
esac
exit "$code"
