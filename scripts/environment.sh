# Sourced by quickstart.sh and test.sh: private virtual environments, each with its own MPI, apart
# from whatever the shell has loaded.

unset PYTHONPATH PYTHONHOME MPI4PY_MPIABI MPI4PY_LIBMPI
unset PYTHONDONTWRITEBYTECODE # else every process compiles the checkout anew
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
# inside a batch job, stay on this machine instead of asking the scheduler for others (MPICH, then
# Open MPI)
export HYDRA_LAUNCHER=fork HYDRA_RMK=user
export PRTE_MCA_ras=^slurm,pbs,lsf,gridengine PRTE_MCA_plm=^slurm

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# The name of the first Python that will do; HPCZERO_PYTHON comes before all others.
find_python() {
    local name package seen="" names=(python3 python3.13 python3.12 python3.11 python3.14 python)
    [ -z "${HPCZERO_PYTHON-}" ] || names=("$HPCZERO_PYTHON")
    for name in "${names[@]}"; do
        command -v "$name" >/dev/null || continue
        if ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            seen+="; $name is $("$name" --version 2>&1 || true)"
        elif ! "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            package=$("$name" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
            seen+="; $name has no venv (Debian and Ubuntu: install $package)"
        else
            echo "$name"
            return
        fi
    done
    fail "needs Python 3.11 or newer with venv${seen:-; found none}. Install or load one" \
        "(e.g. 'module load python'), or name it: HPCZERO_PYTHON=/path/to/python3.12"
}

# make_environment FOLDER EXTRAS [PACKAGE...]: hpczero from this checkout with EXTRAS and PACKAGEs,
# in FOLDER. What is there already is used again unless the list of packages has changed since. A
# folder that was not made here is never touched; who comes second waits for the first.
make_environment() {
    mkdir -p "$(dirname "$1")"
    (
        flock 9 2>/dev/null || true # some systems lack the command, some file systems the locks
        make_environment_alone "$@" 9<&-
    ) 9<"$(dirname "$1")"
}

make_environment_alone() {
    local folder=$1 extras=$2
    shift 2
    local python note="$folder/made-by-hpczero" state
    state="$PWD [$extras] $* $(cat setup.cfg pyproject.toml constraints.txt | cksum)"
    if [ -e "$folder" ]; then
        [ -f "$note" ] ||
            fail "$folder exists and was not made by this script: name another folder or remove it"
        [ "$(cat "$note")" != "$state" ] ||
            ! "$folder/bin/python" -I -c 'import hpczero' 2>/dev/null || return 0
        rm -rf "$folder"
    fi
    python=$(find_python)
    echo "Installing hpczero[$extras] and its packages into $folder" \
        "(once; torch is the large one) ..."
    mkdir -p "$folder"
    echo unfinished >"$note"
    "$python" -m venv "$folder"
    install_into "$folder" -c constraints.txt -e ".[$extras]" "$@" ||
        fail "pip could not install the packages (its message is above); run this again to retry"
    echo "$state" >"$note"
}

# install_into FOLDER ARGUMENT...: by uv where it is there, from where pip would take the packages;
# else, and where uv cannot, by pip.
install_into() {
    local folder=$1 python=$1/bin/python
    shift
    if command -v uv >/dev/null; then
        UV_FIND_LINKS=$(pip_setting "$python" find-links) \
            UV_EXTRA_INDEX_URL=$(pip_setting "$python" extra-index-url) \
            UV_DEFAULT_INDEX=$(pip_setting "$python" index-url) \
            uv pip install -q --compile-bytecode --index-strategy unsafe-best-match \
            --python "$python" "$@" && return
        echo "uv could not install them; pip tries" >&2
    fi
    "$python" -m pip install -qq "$@"
}

# pip_setting PYTHON NAME: from the environment, else from pip's files.
pip_setting() {
    "$1" -m pip config get ":env:.$2" 2>/dev/null ||
        "$1" -m pip config get "global.$2" 2>/dev/null || true
}
