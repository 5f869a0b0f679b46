"""The command line: the verbs, their arguments, and the exit codes (design §4).

Each verb names the function that carries it out as "module:function"; the module is imported only when the verb is used, so that
the verbs for login nodes start at once and need neither MPI nor torch.
"""

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

from hpczero import __version__
from hpczero.errors import HpczeroError

_FOR_TRAINING = ("torch", "mpi4py", "numba")
_WHAT_IT_IS = "Trains large transformers over MPI from one TOML spec."
_EXIT_CODES = "exit codes: 0 done, 1 failed, 2 the input is wrong, 75 stopped with a checkpoint, to be continued"


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character shows its number
    options = _parser().parse_args(arguments)
    module, function = options.carried_out_by.split(":")
    try:
        return int(getattr(importlib.import_module(module), function)(options) or 0)
    except HpczeroError as error:
        print(f"hpczero: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in _FOR_TRAINING:
            raise
        print(f"hpczero: this needs the package {error.name}, which is not installed: pip install 'hpczero[train]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hpczero: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away (`hpczero spec | head`)
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpczero", description=_WHAT_IT_IS, epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"hpczero {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _init(verbs)
    _check(verbs)
    _run(verbs)
    _data(verbs)
    _doctor(verbs)
    _spec(verbs)
    return parser


def _verb(verbs: argparse._SubParsersAction, name: str, carried_out_by: str, description: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=description, description=description, epilog=_EXIT_CODES)
    verb.set_defaults(carried_out_by=carried_out_by)
    return verb


def _takes_spec(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("spec", help="the job's TOML file")
    verb.add_argument("--set", dest="overrides", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override one key (may be repeated)")


def _init(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(verbs, "init", "hpczero.spec.verbs:init", "write a commented spec to start from")
    verb.add_argument("path", nargs="?", default="spec.toml", help="the file to write (default: spec.toml)")


def _check(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(verbs, "check", "hpczero.spec.verbs:check", "read a spec and say what it means, without running it")
    _takes_spec(verb)
    verb.add_argument("--explain", metavar="KEY", help="say what a key means and where its value comes from")
    verb.add_argument("--ranks", type=int, metavar="N", help="also lay the job out over N ranks")
    verb.add_argument("--ranks-per-node", type=int, metavar="K", help="with --ranks: so many ranks on a node")
    verb.add_argument("--json", action="store_true", help="print JSON")


def _run(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(verbs, "run", "hpczero.train.run:run", "train: mpirun -n N hpczero run spec.toml")
    _takes_spec(verb)
    start = verb.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on with the run that is there; an error if there is none")
    start.add_argument("--fresh", action="store_true", help="start anew; the run that is there is moved aside")
    verb.add_argument("--progress", choices=["auto", "live", "lines"], default="auto", help="how progress is shown (auto: live on a terminal)")


def _data(verbs: argparse._SubParsersAction) -> None:
    data = verbs.add_parser("data", help="work with training data", description="Work with training data.")
    kinds = data.add_subparsers(title="verbs", metavar="VERB", required=True)
    build = _verb(kinds, "build", "hpczero.data.verbs:build", "turn text files into a token file")
    build.add_argument("-o", "--output", required=True, help="the token file to write (.h5)")
    build.add_argument("paths", nargs="+", metavar="PATH", help="files, folders or globs; .txt .md .py .jsonl")
    build.add_argument("--tokenizer", default="byte", choices=["byte"], help="how text becomes tokens")
    build.add_argument("--validation-fraction", type=float, default=0.05, help="share of the text kept for validation (default: 0.05)")
    show = _verb(kinds, "show", "hpczero.data.verbs:show", "say what is in a token file")
    show.add_argument("path", help="the token file")
    show.add_argument("--json", action="store_true", help="print JSON")


def _doctor(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(verbs, "doctor", "hpczero.doctor.verb:doctor", "what would go wrong on this machine, and the fix (alone or under mpirun)")
    verb.add_argument("--clean", action="store_true", help="remove shared-memory segments that nobody owns any more")
    verb.add_argument("--json", action="store_true", help="print JSON")


def _spec(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(verbs, "spec", "hpczero.spec.verbs:reference", "print every key of the spec: type, default, role, meaning")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--markdown", action="store_true", help="print the page docs/spec.md")
