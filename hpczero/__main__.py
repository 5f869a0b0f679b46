"""`python -m hpczero` is the same program as `hpczero`."""

import sys

from hpczero.cli import main

sys.exit(main())
