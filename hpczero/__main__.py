"""`python -m hpczero` is the same program as `hpczero`."""

import sys

from hpczero.cli import program

sys.exit(program())
