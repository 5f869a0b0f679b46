#!/usr/bin/env bash
# What only a GPU can tell, on a machine that has one and needs no network: the kernels' tests,
# collectives on its tensors, training on one rank and on several that share it through MPI, speed.
#     scripts/gpu_check.sh [OPTION...] [WHEELS]
#     WHEELS                  a folder with what is missing (the part "first" says what)
#     --list                  the parts, each with its limit in seconds
#     --only REGEX            the parts with such names
#     --from NAME             this part and those behind it
#     --minutes M             begin no part that may end later; the last lines say how to go on
#     --logs FOLDER           where log.txt and table.txt are written (default: runs/gpu-check)
#     --dry-run               where there is no GPU: every part must get as far as saying "no GPU"
# Ends with a table, a line a part; the exit code is 0 if none failed. What was compiled and
# installed is kept for the next call in $TMPDIR, else /tmp. HPCZERO_PYTHON names another python3;
# HPCZERO_GPU_CHECK_DEVICE=cpu tries the runs themselves where there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${HPCZERO_PYTHON:-python3} device=${HPCZERO_GPU_CHECK_DEVICE:-cuda}
only=. from='' minutes='' logs=runs/gpu-check dry='' list='' wheels=''

usage() {
    echo "gpu_check.sh: $1" >&2
    sed -n '4,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --only | --from | --minutes | --logs)
        [ $# -gt 1 ] || usage "$1 wants a value"
        printf -v "${1#--}" %s "$2"
        shift
        ;;
    --dry-run) dry=yes ;;
    --list) list=yes ;;
    -*) usage "unknown option $1" ;;
    *) wheels=$1 ;;
    esac
    shift
done
[[ -z $minutes || $minutes =~ ^[0-9]+$ ]] || usage "--minutes $minutes: it wants a whole number"
[ -z "$wheels" ] || compgen -G "$wheels/*.whl" >/dev/null || usage "$wheels holds no wheel"

kept=${TMPDIR:-/tmp}/hpczero-gpu-check-$(id -u)
mkdir -m 700 "$kept" 2>/dev/null
[ -O "$kept" ] && [ ! -L "$kept" ] || usage "$kept is not a folder of yours: set TMPDIR"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 NO_COLOR=1 HYDRA_LAUNCHER=fork
export TMPDIR="$kept" XDG_CACHE_HOME="$kept/cache" NUMBA_CACHE_DIR="$kept/numba"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PYTHONPATH="$PWD:$PWD/numba_cuda${PYTHONPATH:+:$PYTHONPATH}"

# numba-cuda takes the compiler's libraries from CUDA_HOME, so it is set only where they lie: an
# nvcc that a package has put into the path lies elsewhere, and then numba-cuda finds the packages'
# libraries by itself
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
toolkit=${nvcc:+$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
[ -n "${CUDA_HOME:-}" ] || [ ! -d "$toolkit/nvvm/libdevice" ] || export CUDA_HOME="$toolkit"

if [ -n "$wheels" ] && [ -z "$list" ]; then
    site=$kept/site-$(cd "$wheels" && printf "%s\n" *.whl | cksum | cut -d' ' -f1)
    if [ ! -e "$site/complete" ]; then
        rm -rf "$site"
        # not --target, which leaves out the libraries of packages like mpich
        "$python" -m pip install -qq --no-index --no-deps --no-compile --no-cache-dir \
            --ignore-installed --prefix "$site" "$wheels"/*.whl || exit 1
        touch "$site/complete"
    fi
    packages=$(find "$site" -type d \( -name site-packages -o -name dist-packages \) | paste -sd:)
    # as folders of Python's own: their .pth files count (numba-cuda takes numba.cuda's place by
    # one), and libraries of CUDA are looked for in them
    mkdir "$work/start"
    cat >"$work/start/sitecustomize.py" <<PYTHON
import site
site.PREFIXES.append("$site")
for folder in "$packages".split(":"):
    site.addsitedir(folder)
PYTHON
    export PYTHONPATH="$work/start:$PYTHONPATH:$packages" PATH="$site/bin:$PATH"
    export LD_LIBRARY_PATH="$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    library=$(find "$site/lib" -maxdepth 1 -name 'libmpi.so.[0-9]*' | sort | head -n 1)
    [ -z "$library" ] || export MPI4PY_LIBMPI="$library"
fi
mpirun() {
    local more=()
    [[ $(command mpirun --version 2>&1) != *"Open MPI"* ]] || more=(--oversubscribe)
    command mpirun "${more[@]}" "$@"
}
export -f mpirun

left=''
# part NAME SECONDS COMMAND...: its output goes to the screen and the log, its verdict and the last
# line that says something into the table.
part() {
    local name=$1 limit=$2 started=$SECONDS code=0 note verdict
    shift 2
    [ "$name" != "$from" ] || from=''
    [[ -z $from && $name =~ $only ]] || return 0
    if [ -n "$list" ]; then
        printf '%5s s  %s\n' "$limit" "$name"
        return 0
    fi
    if [ -n "$left" ] ||
        { [ -n "$minutes" ] && [ $((SECONDS + limit)) -gt $((60 * minutes)) ]; }; then
        left=${left:-$name}
        return 0
    fi
    printf '\n== %s (at most %s s)\n' "$name" "$limit" | tee -a "$logs/log.txt"
    (timeout --kill-after=20 "$limit" bash -c "$*") </dev/null 2>&1 |
        tee "$work/out" | tee -a "$logs/log.txt"
    code=${PIPESTATUS[0]}
    note='passed|failed|rror|trained:|differ|GB/s|us a call|tokens/s|no tests|no GPU|lacks'
    note=$(grep -aE "$note" "$work/out" | tail -n 1 | cut -c1-90)
    case $code in 0) verdict=ok ;; 124 | 137) verdict=LATE ;; *) verdict=FAIL ;; esac
    if [ -n "$dry" ]; then
        verdict=FAIL
        ! grep -q 'no GPU' "$work/out" ||
            grep -qE 'Traceback|ImportError|ModuleNotFound' "$work/out" || verdict='no GPU'
    fi
    printf '%-26s %-6s %5s s  %s\n' "$name" "$verdict" $((SECONDS - started)) "$note" |
        tee -a "$logs/log.txt" >>"$logs/table.txt"
}

# tests NAME SECONDS LAUNCHER -- ARGUMENT...: pytest, of which nothing counts that did not run on a
# GPU.
tests() {
    local name=$1 limit=$2 launcher=()
    shift 2
    while [ "$1" != -- ]; do
        launcher+=("$1")
        shift
    done
    shift
    part "$name" "$limit" "${launcher[*]} $python -m pytest -q -p no:cacheprovider $on_a_gpu $*"
}

# train NAME SECONDS RANKS KEY=VALUE...: a run whose losses are to be those of the CPU.
train() {
    local name=$1 limit=$2 ranks=$3 settings='' setting run=${1// /-}
    shift 3
    for setting in "$@"; do settings+=" --set $setting"; done
    part "$name" "$limit" "$reference && cd $work &&
        mpirun -n $ranks $python -m hpczero run check.toml --fresh --progress lines \
            --set name=$run $settings &&
        $python compare.py runs/reference runs/$run"
}

# beside NAME SECONDS RANKS KEY=VALUE...: a run whose losses are to be those of the same run on the
# CPU, which does not compute as the plain one.
beside() {
    local name=$1 limit=$2 ranks=$3 settings='' setting run=${1//[ ,]/-} both
    shift 3
    for setting in "$@"; do settings+=" --set $setting"; done
    both="mpirun -n $ranks $python -m hpczero run check.toml --fresh --progress lines $settings"
    part "$name" "$limit" "cd $work &&
        $both --set name=$run-cpu --set train.device=cpu && $both --set name=$run &&
        $python compare.py runs/$run-cpu runs/$run"
}

cat >"$work/check.toml" <<TOML
name = "reference"
[model]
layers = 2
hidden = 128
heads = 4
seq_len = 64
[data]
source = "synthetic"
[train]
steps = 20
global_batch = 8
micro_batch = 2
precision = "fp32"
device = "$device"
eval_batches = 1
[optimizer]
eps = 1e-6
[checkpoint]
every = 10
TOML
cat >"$work/compare.py" <<'PYTHON'
import json, sys
from pathlib import Path

texts = [(Path(run) / "metrics.jsonl").read_text() for run in sys.argv[1:]]
expected, found = ([json.loads(line)["loss"] for line in text.splitlines()] for text in texts)
if len(expected) != len(found):
    sys.exit(f"{len(expected)} steps on the CPU and {len(found)} here: one of the runs has failed")
worst = max(abs(a - b) / a for a, b in zip(expected, found, strict=True))
print(f"losses differ by at most {worst:.1e} from those of the CPU")
sys.exit(worst > 1e-4)
PYTHON
cat >"$work/look.py" <<'PYTHON'
"""Says what is there; 1 where a package lacks, 3 where no GPU is seen."""
import os, platform, sys
from importlib import metadata

wanted = (
    *("torch", "numba", "numba-cuda", "cuda-core", "mpi4py", "mpich", "h5py", "pydantic"),
    *("pydantic-core", "jinja2", "annotated-types", "typing-inspection", "xxhash", "rich"),
    *("psutil", "pytest", "pytest-mpi", "pytest-timeout", "hypothesis"),
)
found = {
    name: next((each.version for each in metadata.distributions(name=name)), None)
    for name in wanted
}
here = ", ".join(f"{name} {version}" for name, version in found.items() if version)
print(f"Python {platform.python_version()};", here)
home = os.environ.get("CUDA_HOME") or "(not set)"
print("CUDA_HOME =", home, " MPI:", os.environ.get("MPI4PY_LIBMPI", "as mpi4py finds it"))
missing = [name for name, version in found.items() if not version]
has_mpi = os.popen("command -v mpirun").read().strip()
if has_mpi and "mpich" in missing:
    missing.remove("mpich")
if missing:
    python = ".".join(platform.python_version_tuple()[:2])
    print(f"this Python lacks {', '.join(missing)}. Where there is a network:")
    print(f"  pip download --no-deps --only-binary=:all: --python-version {python} \\")
    print("    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\")
    print("    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d wheels \\")
    print(f"    {' '.join(missing)}")
    sys.exit(1)
import torch

if not torch.cuda.is_available():
    print(f"no GPU: torch {torch.__version__} finds none")
    sys.exit(3)
print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
PYTHON

if [ -z "$list" ]; then
    mkdir -p "$logs"
    logs=$(cd "$logs" && pwd)
    : >"$logs/log.txt"
    : >"$logs/table.txt"
fi
on_a_gpu=--gpu look="$python $work/look.py"
[ "$device" != cpu ] || on_a_gpu='' look="{ $python $work/look.py || [ \$? = 3 ]; }"
run="$python -m hpczero run check.toml --progress lines"
reference="{ [ -d $work/runs/reference ] || (cd $work && $run --fresh --set train.device=cpu); }"
[ -z "$dry" ] || reference=true

# what the first part shows: kernels compiled, and a step of stage 3 on two ranks with all of them
# in it
two_ranks="cd $work && mpirun -n 2 $run --fresh --set name=first --set zero.stage=3"
part "first" 180 "{ ! command -v nvidia-smi || nvidia-smi -L; } &&
    { $look || { code=\$?; [ \$code = 3 ] && $two_ranks; exit \$code; }; } &&
    $python -m hpczero doctor --prebuild && $reference && $two_ranks &&
    $python compare.py runs/reference runs/first"
tests "kernels" 240 -- tests/kernels
part "speed of the kernels" 240 "$python scripts/bench_kernels.py --device $device --no-compile"
part "step of GPT 1.5 B" 300 "$python scripts/bench_gpu.py --device $device"
tests "engine, preflight" 120 -- tests/unit/test_device.py tests/unit/planner/test_preflight.py \
    tests/unit/parallel/zero/test_engine_on_a_device.py
for ranks in 1 2 4; do
    tests "collectives, $ranks ranks" 120 mpirun -n $ranks -- \
        --with-mpi tests/mpi/parallel/zero/test_on_a_device.py
done
for stage in 0 1 2 3; do
    train "zero $stage on 1 rank" 60 1 zero.stage=$stage
    train "zero $stage on 2 ranks" 60 2 zero.stage=$stage
done
train "tensor on 2 ranks" 60 2 parallel.tensor=2
train "pipeline on 2 ranks" 60 2 parallel.pipeline=2
train "offloaded states" 60 2 zero.offload=cpu zero.stage=2
train "offloaded activations" 60 1 memory.offload_activations=cpu
train "recomputed blocks" 60 2 memory.recompute=block zero.stage=3
train "replicas on 2 ranks" 60 2 zero.shard_ranks=1
replicas="zero.shard_ranks=1 optimizer.lr=2e-4"
beside "one-bit Adam" 120 2 $replicas optimizer.name=one_bit_adam optimizer.freeze=8
beside "local steps" 120 2 $replicas optimizer.outer.every=5 optimizer.outer.precision=int4
beside "sums in 8 bits" 120 2 $replicas comm.compress=int8
bf16="cd $work && mpirun -n 2 $run --set train.precision=bf16 --set name=bf16"
part "bf16, resumed" 120 "$bf16 --fresh && $bf16 --resume --set train.steps=30 &&
    grep -q '\"resume\"' runs/bf16/events.jsonl"
part "calls of the kernels" 120 \
    "$python scripts/bench_kernels.py --device $device --no-compile --calls 200"
part "beside torch.compile" 300 "$python scripts/bench_kernels.py --device $device"

[ -z "$from" ] || usage "no part is named $from (--list)"
[ -z "$list" ] || exit 0
[ -s "$logs/table.txt" ] || [ -n "$left" ] || usage "no part's name matches --only $only (--list)"
printf '\n'
cat "$logs/table.txt"
[ -z "$left" ] || echo "not begun, as $minutes minutes would not do: go on with --from '$left'"
! grep -qE '^.{27}(FAIL|LATE)' "$logs/table.txt"
