#!/usr/bin/env bash
# From nothing but Python >= 3.11 to tests passed, in private virtual environments with their own MPI (MPICH, then Open MPI).
#     scripts/test.sh            what a change has to pass: under 20 minutes on 2 cores
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
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # as in containers
limit=1800 slow=
[ "$mode" != all ] || limit=7200 slow=--slow

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

# launch NAME RANKS [LAUNCHER-OPTION...] -- ARGUMENT...: MPI tests on so many ranks, and on all smaller worlds of them.
launch() {
    local name=$1 n=$2
    shift 2
    tests "$name-$n" "$limit" "$venv/bin/mpirun" -n "$n" "$@" --with-mpi
}

pure() {
    part ruff 120 "$venv/bin/ruff" check --no-cache .
    part mypy 300 "$venv/bin/mypy" --cache-dir=/dev/null
    part house 60 "$venv/bin/python" scripts/measure_house.py
    tests unit 600 -- tests/unit
    tests batch 600 -- tests/batch
    tests kernels 600 -- tests/kernels
    NUMBA_ENABLE_CUDASIM=1 tests simulator 900 -- tests/kernels/test_operators.py tests/kernels/test_passes.py
}

# two of about the same length
long_runs="tests/system/train/test_run.py tests/system/train/test_trace.py"
# shellcheck disable=SC2086  # several paths
runs() { tests runs "$limit" -- $long_runs; }
# shellcheck disable=SC2086
system() { tests system "$limit" -- tests/system ${long_runs//tests/--ignore=tests}; }

pure_and_more() {
    pure
    runs
    environment test-openmpi train,test openmpi
}

environment test train,mpi,test,dev,ptx
# what GPUs need: collectives by torch.distributed, and tensors of a device that does things later
devices="tests/mpi/comm/test_group.py tests/mpi/parallel/zero/test_data_parallel.py tests/mpi/parallel/zero/test_zero.py"
libraries="tests/mpi/comm/test_group.py tests/mpi/comm/test_world.py tests/mpi/comm/test_shared.py tests/mpi/parallel/zero/test_data_parallel.py"
odd_worlds="tests/mpi/parallel/zero/test_zero.py::test_several_nodes tests/mpi/checkpoint/test_checkpoint.py::test_ranks_meet_while_one_is_slow" # of 2 or 3 ranks
odd_worlds+=" tests/mpi/parallel/pipeline/test_user_stages.py::test_a_module_that_runs_in_two_chunks_of_a_stage"
# shellcheck disable=SC2086  # several paths
case $mode-${#paths[@]} in
*-[!0]*)
    tests paths 1800 -- "${paths[@]}"
    ;;
quick-*)
    pure
    launch mpich 2 -- tests/mpi
    ;;
usual-*)
    at_once pure_and_more system
    # one size of world for most tests, another for every other launch
    launch mpich 4 -- tests/mpi -k "not (1-ranks or 2-ranks or 3-ranks) or grids"
    launch mpich 8 -- tests/mpi/parallel/test_grids.py -k "test_equals_the_serial_run and 8-ranks or test_nodes_that_divide"
    for means in gloo queued; do launch $means 2 -- --means $means $devices -k 2-ranks; done
    environment test-openmpi train,test openmpi
    launch openmpi 3 --oversubscribe -- $libraries $odd_worlds
    ;;
all-*)
    pure
    runs
    system
    for n in 8 32; do launch mpich $n -- tests/mpi; done
    for means in gloo queued; do
        launch $means 3 -- --means $means $devices -k 3-ranks
        launch $means 2 -- --means $means tests/mpi/parallel/test_grids.py -k 2-ranks
    done
    environment test-openmpi train,test openmpi
    for n in 8 32; do launch openmpi $n --oversubscribe -- tests/mpi; done
    ;;
esac
"$venv/bin/python" scripts/count_tests.py "$results"
