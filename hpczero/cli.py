"""The command line: the verbs, their arguments, and the exit codes (design §4).

Each verb names the function that carries it out as "module:function"; the module is imported only when the verb is used, so that
the verbs for login nodes start at once and need neither MPI nor torch.
"""

import argparse
import errno
import importlib
import io
import sys
from collections.abc import Sequence

from hpczero import __version__, env
from hpczero.errors import HpczeroError, InputError, for_terminal

_FOR_TRAINING = ("torch", "mpi4py", "numba")
_OF_PATHS = {
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EACCES,
}
_WHAT_IT_IS = "Trains large transformers over MPI from one TOML spec."
_EXIT_CODES = "exit codes: 0 done, 1 failed, 2 the input is wrong, 75 stopped with a checkpoint, to be continued"


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a character shows its number
    code = _carry_out(_parser().parse_args(arguments))
    if code == InputError.exit_code:
        env.wrong_input()
    return code


def _carry_out(options: argparse.Namespace) -> int:
    module, function = options.carried_out_by.split(":")
    try:
        return int(getattr(importlib.import_module(module), function)(options) or 0)
    except HpczeroError as error:
        print(f"hpczero: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in _FOR_TRAINING:
            raise
        way_out = env.install("train")
        print(
            f"hpczero: this needs the package {error.name}, which is not installed: {way_out}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("hpczero: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away (`hpczero spec | head`)
        sys.stderr.close()
        return 1
    except (
        OSError
    ) as error:  # of a path that nobody has asked about before: too long, gone, no right
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"hpczero: {for_terminal(f'{where}{error.strerror}')}", file=sys.stderr)
        return InputError.exit_code if error.errno in _OF_PATHS else HpczeroError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpczero", description=_WHAT_IT_IS, epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"hpczero {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _init(verbs)
    _check(verbs)
    _run(verbs)
    _render(verbs)
    _submit(verbs)
    _submitted(verbs)
    _data(verbs)
    _checkpoints(verbs)
    _doctor(verbs)
    _site(verbs)
    _spec(verbs)
    return parser


def _verb(
    verbs: argparse._SubParsersAction, name: str, carried_out_by: str, description: str
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=description, description=description, epilog=_EXIT_CODES
    )
    verb.set_defaults(carried_out_by=carried_out_by)
    return verb


def _takes_spec(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("spec", help="the job's TOML file")
    verb.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one key (may be repeated)",
    )


def _init(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs, "init", "hpczero.commands.check:init", "write a commented spec to start from"
    )
    verb.add_argument(
        "path", nargs="?", default="spec.toml", help="the file to write (default: spec.toml)"
    )


def _check(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs,
        "check",
        "hpczero.commands.check:check",
        "read a spec and say what it means, without running it",
    )
    _takes_spec(verb)
    verb.add_argument(
        "--explain", metavar="KEY", help="say what a key means and where its value comes from"
    )
    verb.add_argument("--ranks", type=int, metavar="N", help="also lay the job out over N ranks")
    verb.add_argument(
        "--ranks-per-node", type=int, metavar="K", help="with --ranks: so many ranks on a node"
    )
    verb.add_argument("--json", action="store_true", help="print JSON")


def _run(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs, "run", "hpczero.commands.run:run", "train: mpirun -n N hpczero run spec.toml"
    )
    _takes_spec(verb)
    start = verb.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run that is there; an error if there is none",
    )
    start.add_argument(
        "--fresh", action="store_true", help="start anew; the run that is there is moved aside"
    )
    verb.add_argument(
        "--progress",
        choices=["auto", "live", "lines"],
        default="auto",
        help="how progress is shown (auto: live on a terminal)",
    )


def _render(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs,
        "render",
        "hpczero.commands.site:render",
        "write the batch script of a job, for Slurm or PBS",
    )
    _takes_spec(verb)
    verb.add_argument("-o", "--output", metavar="FILE", help="write it there, not to stdout")


def _submit(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs,
        "submit",
        "hpczero.batch.submit:submit",
        "hand a run over to Slurm or PBS, as one job or a chain of them",
    )
    _takes_spec(verb)
    verb.add_argument("--dry-run", action="store_true", help="print the script, and submit nothing")
    verb.add_argument(
        "--probe",
        action="store_true",
        help="only try it: the same layout for five steps, a save and a restore, as a run of its own",
    )
    verb.add_argument(
        "--wait",
        action="store_true",
        help="come back when its jobs have ended; 0 if the run is finished then",
    )


def _submitted(verbs: argparse._SubParsersAction) -> None:
    which = "the run's directory, its name, or its spec"
    status = _verb(
        verbs,
        "status",
        "hpczero.commands.jobs:status",
        "how a run stands, or all that were submitted",
    )
    all_of_them = "default: all that were submitted, a row each"
    status.add_argument("run", nargs="?", metavar="RUN", help=f"{which} ({all_of_them})")
    status.add_argument("--json", action="store_true", help="print JSON")
    runs = _verb(
        verbs,
        "runs",
        "hpczero.commands.jobs:runs",
        "all runs below a folder, a row each, also those started by hand",
    )
    runs.add_argument(
        "folder", nargs="?", metavar="FOLDER", default="runs", help="the folder (default: runs)"
    )
    runs.add_argument("--json", action="store_true", help="print JSON")
    cancel = _verb(
        verbs,
        "cancel",
        "hpczero.commands.jobs:cancel",
        "take a run's jobs out of the queue, and end those that run",
    )
    cancel.add_argument("run", metavar="RUN", help=which)
    logs = _verb(verbs, "logs", "hpczero.commands.logs:logs", "what a run's newest job has printed")
    logs.add_argument("run", metavar="RUN", help=which)
    logs.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on with what is printed, until no job is left",
    )
    logs.add_argument(
        "--rank", type=int, metavar="R", help="where this rank runs, and the lines that name it"
    )


def _data(verbs: argparse._SubParsersAction) -> None:
    data = verbs.add_parser(
        "data", help="work with training data", description="Work with training data."
    )
    kinds = data.add_subparsers(title="verbs", metavar="VERB", required=True)
    build = _verb(
        kinds, "build", "hpczero.commands.data:build", "turn text files into a token file"
    )
    build.add_argument("-o", "--output", required=True, help="the token file to write (.h5)")
    build.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="files, folders or globs; .txt .md .py .jsonl, also as .gz",
    )
    build.add_argument(
        "--tokenizer", default="byte", choices=["byte"], help="how text becomes tokens"
    )
    build.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        help="share of the text kept for validation (default: 0.05)",
    )
    build.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help='where the text stands in a line of .jsonl (default: "text")',
    )
    show = _verb(kinds, "show", "hpczero.commands.data:show", "say what is in a token file")
    verify = _verb(
        kinds,
        "verify",
        "hpczero.commands.data:verify",
        "read all of a token file and hold it against its checksums",
    )
    for verb in (show, verify):
        verb.add_argument("path", help="the token file")
        verb.add_argument("--json", action="store_true", help="print JSON")


_WHICH = "a checkpoint's folder, or a run's directory (then its newest complete one)"


def _checkpoints(verbs: argparse._SubParsersAction) -> None:
    ckpt = verbs.add_parser(
        "ckpt",
        help="look into checkpoints",
        description="Look into checkpoints, without MPI and torch.",
    )
    kinds = ckpt.add_subparsers(title="verbs", metavar="VERB", required=True)
    ls = _verb(
        kinds,
        "ls",
        "hpczero.commands.checkpoint:ls",
        "which checkpoints there are, and whether they are complete",
    )
    ls.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        default=["runs"],
        help="runs, folders of runs or of checkpoints (default: runs)",
    )
    show = _verb(
        kinds,
        "show",
        "hpczero.commands.checkpoint:show",
        "what is in a checkpoint, and which rank and file holds it",
    )
    _takes_checkpoint(show)
    show.add_argument(
        "--pieces",
        action="store_true",
        help="also every piece: rank, file, where it begins, which part of the tensor",
    )
    stats = _verb(
        kinds,
        "stats",
        "hpczero.commands.checkpoint:stats",
        "norm, mean, std, min, max, and how many NaN and infinities, of each tensor",
    )
    _takes_checkpoint(stats)
    diff = _verb(
        kinds,
        "diff",
        "hpczero.commands.checkpoint:diff",
        "which tensors of two checkpoints differ, and by how much; 0: none, 1: some",
    )
    diff.add_argument("a", metavar="A", help=_WHICH)
    diff.add_argument("b", metavar="B", help="what it is compared with")
    diff.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="T",
        help="relative norm of a difference that does not count (default: 0)",
    )
    for verb, slot in ((stats, "model"), (diff, "all")):
        choices = ["model", "moment1", "moment2", "all"]
        verb.add_argument(
            "--slot",
            choices=choices,
            default=slot,
            help=f"of the weights, or of a moment (default: {slot})",
        )
    verify = _verb(
        kinds,
        "verify",
        "hpczero.commands.checkpoint_upkeep:verify",
        "hold all of it against its checksums (alone or under mpirun)",
    )
    verify.add_argument("checkpoints", nargs="+", metavar="CKPT", help=_WHICH)
    _takes_step(verify)
    for verb in (ls, show, stats, diff, verify):
        verb.add_argument("--json", action="store_true", help="print JSON")
    _changing(kinds)


def _changing(kinds: argparse._SubParsersAction) -> None:
    export = _verb(
        kinds,
        "export",
        "hpczero.commands.checkpoint_upkeep:export",
        "write the weights as safetensors",
    )
    export.add_argument("checkpoint", metavar="CKPT", help=_WHICH)
    export.add_argument("output", metavar="OUT", help="a file *.safetensors, or a folder")
    export.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="several files of at most this size (5GB), with an index, in the folder OUT",
    )
    export.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        default="fp32",
        help="of the weights (default: fp32, as they are)",
    )
    _takes_step(export)
    adopt = _verb(
        kinds,
        "import",
        "hpczero.commands.checkpoint_upkeep:import_",
        "make a checkpoint at step 0 of weights in safetensors files",
    )
    adopt.add_argument(
        "files", nargs="+", metavar="FILE", help="safetensors files, or folders of them"
    )
    adopt.add_argument(
        "--spec", required=True, help="the job's TOML file: its model has these tensors"
    )
    adopt.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one key (may be repeated)",
    )
    adopt.add_argument(
        "-o", "--output", metavar="RUN", help="the run's directory (default: that of the spec)"
    )
    prune = _verb(
        kinds,
        "prune",
        "hpczero.commands.checkpoint_upkeep:prune",
        "remove checkpoints; never the newest complete one",
    )
    prune.add_argument(
        "path", metavar="RUN", help="a run's directory, or its folder of checkpoints"
    )
    prune.add_argument("--keep", type=int, metavar="N", help="keep the N newest complete ones")
    prune.add_argument(
        "--keep-every",
        type=int,
        default=0,
        metavar="K",
        help="with --keep: also those of steps that K divides",
    )
    for state in ("incomplete", "damaged", "set-aside"):
        prune.add_argument(
            f"--{state}", action="store_true", help=f"also those that are {state.replace('-', ' ')}"
        )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _takes_checkpoint(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("checkpoint", metavar="CKPT", help=_WHICH)
    verb.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="tensors by name, as in a shell; without *, ? and [: that contain it",
    )
    _takes_step(verb)


def _takes_step(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint of this step")


def _doctor(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs,
        "doctor",
        "hpczero.commands.doctor:doctor",
        "what would go wrong on this machine, and the fix (alone or under mpirun)",
    )
    verb.add_argument(
        "--clean",
        action="store_true",
        help="remove shared-memory segments that nobody owns any more",
    )
    verb.add_argument(
        "--prebuild",
        action="store_true",
        help="compile the kernels for this kind of computer, so that no job has to",
    )
    verb.add_argument("--json", action="store_true", help="print JSON")


def _site(verbs: argparse._SubParsersAction) -> None:
    site = verbs.add_parser(
        "site",
        help="what is known of sites",
        description="What is known of sites: nodes, queues, launchers.",
    )
    kinds = site.add_subparsers(title="verbs", metavar="VERB", required=True)
    ls = _verb(kinds, "list", "hpczero.commands.site:list_", "which sites and partitions there are")
    show = _verb(
        kinds,
        "show",
        "hpczero.commands.site:show",
        "a site's nodes, limits, and what a job has there by default",
    )
    show.add_argument("name", metavar="SITE", help='as in "perlmutter" or "perlmutter/gpu"')
    for verb in (ls, show):
        verb.add_argument("--json", action="store_true", help="print JSON")
    new = _verb(
        kinds,
        "new",
        "hpczero.commands.site:new",
        "write a profile of this site from what its scheduler says",
    )
    new.add_argument("name", metavar="NAME", help="of the site")
    new.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write it there (default: sites/NAME.toml in the user's settings)",
    )


def _spec(verbs: argparse._SubParsersAction) -> None:
    verb = _verb(
        verbs,
        "spec",
        "hpczero.commands.check:reference",
        "print every key of the spec: type, default, role, meaning",
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--markdown", action="store_true", help="print the page docs/spec.md")
