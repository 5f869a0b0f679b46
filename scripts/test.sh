#!/usr/bin/env bash
# From nothing but Python >= 3.11 to tests passed, in private virtual environments with their own
# MPI (MPICH and Open MPI).
#     scripts/test.sh                     what a change has to pass: every promise once
#     scripts/test.sh --all               the full products of all settings, in parts (hours)
#     scripts/test.sh --all --part NAME   only this part; may be repeated. --part alone lists them
#     scripts/test.sh [-n RANKS] [--library openmpi] [--slow] PATH...
#                                         only these tests, on so many ranks; the rest is pytest's
# Ends with the line "N passed, N failed, N skipped" over all parts; the exit code is 0 if none
# failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
source scripts/parts.sh

[ -t 1 ] || export NO_COLOR=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # as in containers
limit=2700 slow=() # seconds of a part: twice what slow processors take

# environment LIBRARY: the virtual environment of this MPI library, for the parts that follow.
environment() {
    local started=$SECONDS
    case $1 in
    mpich) venv=$PWD/.venv-test && make_environment "$venv" train,mpi,test,dev,ptx ;;
    openmpi) venv=$PWD/.venv-test-openmpi && make_environment "$venv" train,test openmpi ;;
    *) fail "--library $1: there are mpich and openmpi" ;;
    esac
    [ $((SECONDS - started)) -lt 3 ] || echo "environment $1: $((SECONDS - started)) s"
}

# tests NAME [-n RANKS] [--library NAME] [--simulator] [--slow] ARGUMENT...: a part that is pytest
# with these arguments.
tests() {
    local name=$1 options=(--junitxml="$results/$1.xml" ${slow[@]+"${slow[@]}"})
    local launcher=() library=mpich ranks=
    shift
    while :; do
        case ${1-} in
        -n)
            [[ ${2-} =~ ^[1-9][0-9]*$ ]] || fail "-n ${2-}: say how many ranks, such as -n 3"
            ranks=$2
            shift
            ;;
        --library)
            library=${2:?openmpi or mpich}
            shift
            ;;
        --simulator) launcher=(env NUMBA_ENABLE_CUDASIM=1) ;;
        --slow) options+=(--slow) ;;
        *) break ;;
        esac
        shift
    done
    [ -n "${1-}" ] || fail "which tests? Name files or folders, such as tests/unit"
    environment "$library"
    if [ -n "$ranks" ]; then
        launcher=("$venv/bin/mpirun" -n "$ranks")
        [ "$library" != openmpi ] || launcher+=(--oversubscribe)
        options+=(--with-mpi)
    fi
    part "$name" "$limit" ${launcher[@]+"${launcher[@]}"} \
        "$venv/bin/python" -m pytest -q -p no:cacheprovider "${options[@]}" "$@"
}

checks() {
    part ruff 120 "$venv/bin/ruff" check --no-cache .
    part mypy 300 "$venv/bin/mypy" --cache-dir=/dev/null
    part house 60 "$venv/bin/python" scripts/measure_house.py
    tests unit tests/unit
    tests kernels tests/kernels
    tests simulator --simulator tests/kernels/test_{operators,passes,signs,quantised}.py
    environment openmpi
}

commands() { tests commands tests/system; }

every_promise() {
    local zero=tests/mpi/parallel/zero
    local several=(tests/mpi/comm "$zero/test_data_parallel.py")
    several+=("$zero/test_zero.py::test_every_way_equals_the_serial_run")
    several+=("$zero/test_zero.py::test_several_nodes")
    environment mpich
    at_once checks commands
    tests mpich -n 4 tests/mpi
    tests openmpi -n 3 --library openmpi "${several[@]}"
    # what GPUs need: torch.distributed's collectives, and tensors of a device that is late
    tests gloo -n 2 --means gloo "${several[@]}"
    several+=("$zero/test_other_optimizers.py::test_an_optimizer_steps_as_its_twin")
    tests queued -n 2 --means queued "${several[@]}"
}

# named_part NAME: the runs that scripts/all_parts.py lists for it.
named_part() {
    local number=0 line lines
    environment mpich
    [ "$1" != reports ] || scripts/install_browser.sh
    lines=$("$venv/bin/python" scripts/all_parts.py runs "$1")
    while read -r line; do
        # shellcheck disable=SC2086  # several words
        tests "$1-$((++number))" $line
    done <<<"$lines"
}

all='' parts=()
while :; do
    case ${1-} in
    --all) all=1 limit=7200 slow=(--slow) && shift ;;
    --part)
        [ -n "${2-}" ] || exec "$(find_python)" scripts/all_parts.py
        "$(find_python)" scripts/all_parts.py runs "$2" >/dev/null || exit 2
        all=1 limit=7200 slow=(--slow) parts+=("$2") && shift 2
        ;;
    -h | --help)
        sed -n '2,/^set/s/^# \?//p' "$0"
        exit
        ;;
    *) break ;;
    esac
done
case $all-$# in
-0) every_promise ;;
1-0)
    if [ ${#parts[@]} = 0 ]; then
        mapfile -t parts < <("$(find_python)" scripts/all_parts.py names)
    fi
    for name in "${parts[@]}"; do named_part "$name"; done
    ;;
-*) tests paths "$@" ;;
*) fail "--all runs all tests, in parts: name a part (--part NAME), or paths without --all" ;;
esac
"$(find_python)" scripts/count_tests.py "$results" "$SECONDS"
