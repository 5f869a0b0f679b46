# Sourced by test.sh, after environment.sh: runs the parts of the tests, each with a time limit, and
# lets none leave a process behind.
#
# $results is a new folder that vanishes at the end. Every process of a part has "$results/NAME" in
# its environment as HPCZERO_TEST_RUN, and is found by that wherever it has gone. The parts'
# temporary files and caches lie there too.

results=$(mktemp -d)
mkdir "$results/tmp"
lanes=() share=0/1
# processes [NAME]: the numbers of those that belong to the part, or to any.
processes() {
    local folder
    folder=$(printf '%s' "$results" | sed 's/[^[:alnum:]/_-]/[&]/g') # in a regular expression
    grep -lszE "^HPCZERO_TEST_RUN=$folder/${1:-.*}\$" /proc/[0-9]*/environ | cut -d/ -f3 || true
}
end_processes() { processes "$@" | xargs -r kill -KILL 2>/dev/null || true; }
clean_up() { # a failure in here would be the script's
    [ ${#lanes[@]} = 0 ] || kill "${lanes[@]}" 2>/dev/null || true
    end_processes
    rm -rf "$results"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# part NAME SECONDS COMMAND...: enters a line into $results/parts: name, exit code, processes left
# running (after 5 s of grace), seconds, processor-seconds of all its processes. They keep to the
# cores of $share (see measured.py).
part() {
    local name=$1 limit=$2 started=$SECONDS code=0 left=0
    shift 2
    printf '\n== %s\n' "$name"
    # in the background, so that a signal to this script counts at once; as a job, so that Ctrl-C is
    # not ignored in there
    set -m
    env HPCZERO_TEST_RUN="$results/$name" TMPDIR="$results/tmp" XDG_CACHE_HOME="$results/cache" \
        OMP_WAIT_POLICY=PASSIVE \
        "$(find_python)" scripts/measured.py "$results/measured-$name" "$share" \
        timeout --kill-after=20 "$limit" "$@" </dev/null &
    set +m
    wait $! || code=$?
    [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || echo "$name: ended after its limit of $limit s"
    for _ in {1..10}; do
        left=$(processes "$name" | wc -l)
        [ "$left" -gt 0 ] || break
        sleep 0.5
    done
    end_processes "$name"
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$code" "$left" $((SECONDS - started)) \
        "$(cat "$results/measured-$name" || echo 0)" >>"$results/parts"
}

# at_once LANE...: functions that run parts which need one core, each beside the others on cores of
# its own; what they print is shown when all have ended.
at_once() {
    local lane number=0
    printf '\n== at the same time: %s\n' "$*"
    for lane in "$@"; do
        share=$number/$# "$lane" >"$results/$lane.log" 2>&1 &
        lanes+=($!)
        number=$((number + 1))
    done
    for lane in "$@"; do
        # how its parts ended is in $results/parts; a lane that stops between them is a failure
        wait "${lanes[0]}" || printf '%s\t%s\t0\t0\t0\n' "$lane" $? >>"$results/parts"
        lanes=("${lanes[@]:1}")
    done
    for lane in "$@"; do
        cat "$results/$lane.log"
    done
}
