"""The command line: verbs, their arguments and the exit codes.

Each verb names the function that carries it out as "module:function". The module is imported only
when the verb is used, so that verbs for login nodes start at once and need neither MPI nor torch.
"""

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR

from hpczero import env
from hpczero.arguments import EXIT_CODES, add_verbs
from hpczero.errors import HpczeroError, InputError, for_terminal
from hpczero.verbs import VERBS

_FOR_TRAINING = ("torch", "mpi4py", "numba")
_PATH_ERRORS = {EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR}
_DESCRIPTION = "Trains large transformers over MPI from one TOML spec."


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line (default: that of the process) and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that cannot show a character shows its number
            stream.reconfigure(errors="backslashreplace")
    code = _carry_out(_parsed(arguments))
    if code == InputError.exit_code:
        env.note_wrong_input()
    return code


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a list of paths or texts may also go on behind options."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    named = options.list_argument
    if more and (named is None or any(word.startswith("-") and word != "-" for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        before = getattr(options, named.dest)
        setattr(options, named.dest, more if before == named.default else [*before, *more])
    return options


def _carry_out(options: argparse.Namespace) -> int:
    module, function = options.carried_out_by.split(":")
    try:
        return int(getattr(importlib.import_module(module), function)(options) or 0)
    except HpczeroError as error:
        return _failed(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in _FOR_TRAINING:
            raise
        way_out = env.install("train")
        return _failed(f"this needs the package {error.name}, which is not installed: {way_out}")
    except KeyboardInterrupt:
        return _failed("interrupted")
    except BrokenPipeError:  # the reader of our output went away (`hpczero spec | head`)
        sys.stderr.close()
        return 1
    except OSError as error:  # about a path that no code has checked: too long, gone, no permission
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        code = InputError.exit_code if error.errno in _PATH_ERRORS else HpczeroError.exit_code
        return _failed(for_terminal(f"{where}{error.strerror}"), code)


def _failed(message: str, code: int = HpczeroError.exit_code) -> int:
    print(f"hpczero: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpczero", description=_DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"hpczero {env.VERSION}")
    add_verbs(parser, VERBS)
    return parser
