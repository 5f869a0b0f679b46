#!/usr/bin/env bash
# From nothing but Python >= 3.11 to a finished training run: a private virtual environment with its
# own MPI, then a small GPT trained by two processes on the text of Python's own library. Run it
# again at will: the environment is used again, the run starts anew.
#     HPCZERO_VENV=FOLDER     where the environment goes (default: .venv-quickstart in the checkout)
#     HPCZERO_PYTHON=PYTHON   the Python to use (default: the first one found that is new enough)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
[ $# -eq 0 ] || fail "takes no arguments"

venv=${HPCZERO_VENV:-$PWD/.venv-quickstart}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
make_environment "$venv" train,mpi

"$venv/bin/mpirun" -n 2 "$venv/bin/hpczero" run jobspecs/quickstart.toml --fresh

cat <<END

What to try next:
  source $(printf %q "$venv")/bin/activate
  hpczero doctor                                              # this machine, as hpczero sees it
  hpczero check jobspecs/quickstart.toml --explain train.steps
  mpirun -n 2 hpczero run jobspecs/quickstart.toml --fresh --set train.steps=600
  hpczero init my.toml                            # a spec of your own; README.md goes on
END
