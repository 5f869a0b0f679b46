"""A note to the script of the batch job: a rank found the input wrong.

Exit code 2 of one rank may not reach the script: a launcher that kills the other ranks may end with
the code of one of those.
"""

import contextlib

from hpczero import env, safe_files
from hpczero.errors import HpczeroError


def wrong_input() -> None:
    """Leave the note, if this process belongs to a job whose script looks for one."""
    note = env.wrong_input_note()
    if note:
        with contextlib.suppress(OSError, HpczeroError):  # then the exit code has to say it
            safe_files.touch(note)
