#!/usr/bin/env bash
# What only a GPU can tell, on a machine that has one and needs no network: the kernels' tests, the collectives on its tensors, the trainer on one
# and on two ranks that share it through MPI, and the kernels' speed.
#     scripts/gpu_check.sh            with what is installed: python3 (or HPCZERO_PYTHON) with a torch for CUDA, and an MPI's mpirun
#     scripts/gpu_check.sh WHEELS     what is missing comes as wheels from this folder; nothing else is asked for, nothing is left behind
#     scripts/gpu_check.sh --only 'kernels|speed' [WHEELS]    only the parts with such names, where a machine is lent for minutes
# Ends with a table, a line per part; the exit code is 0 if none failed. HPCZERO_GPU_CHECK_LIMIT: seconds for a part (300);
# HPCZERO_GPU_CHECK_DEVICE=cpu tries the script itself where there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${HPCZERO_PYTHON:-python3} limit=${HPCZERO_GPU_CHECK_LIMIT:-300} device=${HPCZERO_GPU_CHECK_DEVICE:-cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 NO_COLOR=1 TMPDIR="$work" XDG_CACHE_HOME="$work/cache" HYDRA_LAUNCHER=fork
export PYTHONPATH="$PWD:$PWD/numba_cuda${PYTHONPATH:+:$PYTHONPATH}" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

only=.
if [ "${1:-}" = --only ]; then
    only=$2
    shift 2
fi
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
[ -z "$nvcc" ] || export CUDA_HOME="${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$nvcc")")")}" # numba-cuda takes the compiler's libraries from there

if [ $# -gt 0 ]; then
    # not --target, which leaves out the libraries of packages like mpich
    "$python" -m pip install -qq --no-index --no-deps --no-compile --no-cache-dir --ignore-installed --prefix "$work/site" "$1"/*.whl || exit 1
    packages=$(find "$work/site" -type d \( -name site-packages -o -name dist-packages \) | paste -sd:)
    # as folders of Python's own: their .pth files count (numba-cuda takes numba.cuda's place by one), and libraries of CUDA are looked for in them
    mkdir "$work/start"
    cat >"$work/start/sitecustomize.py" <<PYTHON
import site
site.PREFIXES.append("$work/site")
for folder in "$packages".split(":"):
    site.addsitedir(folder)
PYTHON
    export PYTHONPATH="$work/start:$PYTHONPATH:$packages" PATH="$work/site/bin:$PATH" LD_LIBRARY_PATH="$work/site/lib:${LD_LIBRARY_PATH:-}"
    library=$(find "$work/site/lib" -maxdepth 1 -name 'libmpi.so.[0-9]*' | sort | head -n 1)
    [ -z "$library" ] || export MPI4PY_LIBMPI="$library"
fi
mpirun() { command mpirun $([[ $(command mpirun --version 2>&1) != *"Open MPI"* ]] || echo --oversubscribe) "$@"; }
export -f mpirun

# part NAME COMMAND...: its output stays on the screen, its verdict and the last line that says something go into the table.
part() {
    local name=$1 started=$SECONDS code=0
    shift
    [[ $name =~ $only ]] || return 0
    printf '\n== %s\n' "$name"
    (timeout --kill-after=20 "$limit" bash -c "$*") </dev/null 2>&1 | tee "$work/out"
    code=${PIPESTATUS[0]}
    local note verdict
    note=$(grep -aE 'passed|failed|error|trained:|differ|GB/s|us a call|tokens/s|no tests' "$work/out" | tail -n 1 | cut -c1-90)
    case $code in 0) verdict=ok ;; 124 | 137) verdict=LATE ;; *) verdict=FAIL ;; esac
    printf '%-26s %-5s %5s s  %s\n' "$name" "$verdict" $((SECONDS - started)) "$note" >>"$work/table"
}

# train NAME RANKS KEY=VALUE...: a run whose losses are to be those of the CPU.
train() {
    local name=$1 ranks=$2 settings=
    shift 2
    [[ $name =~ $only ]] || return 0
    [ -d "$work/runs/reference" ] || only=. part "reference on the CPU" "cd $work && $python -m hpczero run check.toml --fresh --progress lines --set train.device=cpu"
    for setting in "$@"; do settings+=" --set $setting"; done
    part "$name" "cd $work && mpirun -n $ranks $python -m hpczero run check.toml --fresh --progress lines --set name=${name// /-} $settings &&
        $python compare.py runs/reference runs/${name// /-}"
}

cat >"$work/check.toml" <<'TOML'
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
device = "DEVICE"
eval_batches = 1
[optimizer]
eps = 1e-6
[checkpoint]
every = 10
TOML
sed -i "s/DEVICE/$device/" "$work/check.toml"
cat >"$work/compare.py" <<'PYTHON'
import json, sys
from pathlib import Path

expected, found = ([json.loads(line)["loss"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()] for run in sys.argv[1:])
if len(expected) != len(found):
    sys.exit(f"{len(expected)} steps on the CPU and {len(found)} here: one of the runs has failed")
worst = max(abs(a - b) / a for a, b in zip(expected, found, strict=True))
print(f"losses differ by at most {worst:.1e} from those of the CPU")
sys.exit(worst > 1e-4)
PYTHON

[ $device = cpu ] || part "GPU" "nvidia-smi -L && $python -c '
import torch
assert torch.cuda.is_available(), \"torch finds no GPU\"
print(torch.__version__, torch.cuda.get_device_name(0))'"
part "doctor" "$python -m hpczero doctor --prebuild"
part "kernels" "$python -m pytest -q -p no:cacheprovider tests/kernels"
part "engine, preflight" "$python -m pytest -q -p no:cacheprovider tests/unit/test_device.py tests/unit/test_engine_on_a_device.py tests/unit/test_preflight.py"
for ranks in 1 2 4; do
    part "collectives, $ranks ranks" "mpirun -n $ranks $python -m pytest -q --with-mpi -p no:cacheprovider tests/mpi/test_on_a_device.py"
done
for stage in 0 1 2 3; do
    train "zero $stage on 1 rank" 1 zero.stage=$stage
    train "zero $stage on 2 ranks" 2 zero.stage=$stage
done
train "tensor on 2 ranks" 2 parallel.tensor=2
train "pipeline on 2 ranks" 2 parallel.pipeline=2
part "bf16 on 2 ranks" "cd $work && mpirun -n 2 $python -m hpczero run check.toml --fresh --progress lines --set train.precision=bf16 --set name=bf16"
part "resume on 2 ranks" "cd $work && mpirun -n 2 $python -m hpczero run check.toml --resume --progress lines --set train.precision=bf16 --set name=bf16 \
    --set train.steps=30 && grep -q '\"resume\"' runs/bf16/events.jsonl"
if [ $device != cpu ]; then
    part "step of GPT 1.5 B" "$python scripts/bench_gpu.py"
    part "calls of the kernels" "$python scripts/bench_kernels.py --no-compile --calls 200"
    part "speed of the kernels" "$python scripts/bench_kernels.py"
fi

[ -s "$work/table" ] || { echo "gpu_check.sh: no part's name matches --only"; exit 2; }
printf '\n'
cat "$work/table"
! grep -qE '^.{27}(FAIL|LATE)' "$work/table"
