"""The verbs of the command line: for each the function that carries it out, as "module:function",
a line of help, and its arguments.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

EXIT_CODES = (
    "exit codes: 0 done, 1 failed, 2 the input is wrong, "
    "75 stopped with a checkpoint, to be continued"
)

_Argument = Callable[[argparse._ActionsContainer], object]  # adds it to a parser
_Verb = Callable[[argparse._SubParsersAction, str], None]  # adds it, under its name, to a parser


def _argument(names: str, help: str, **settings: Any) -> _Argument:
    """Describe what argparse's `add_argument` takes; names as in "-o --output FILE"."""
    words = names.split()
    if words[-1].isupper():
        settings["metavar"] = words.pop()
    return lambda parser: parser.add_argument(*words, help=help, **settings)


def _flag(names: str, help: str) -> _Argument:
    return _argument(names, help, action="store_true")


def _at_most_one(*arguments: _Argument) -> _Argument:
    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def _verb(carried_out_by: str, description: str, *arguments: _Argument) -> _Verb:
    def add(verbs: argparse._SubParsersAction, name: str) -> None:
        verb = verbs.add_parser(name, help=description, description=description, epilog=EXIT_CODES)
        verb.set_defaults(carried_out_by=carried_out_by)
        for argument in arguments:
            argument(verb)

    return add


def _verb_group(help: str, description: str, members: Mapping[str, _Verb]) -> _Verb:
    """Describe a verb that only has verbs of its own, as `hpczero ckpt`."""

    def add(verbs: argparse._SubParsersAction, name: str) -> None:
        add_verbs(verbs.add_parser(name, help=help, description=description), members)

    return add


def add_verbs(parser: argparse.ArgumentParser, verbs: Mapping[str, _Verb]) -> None:
    added = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, verb in verbs.items():
        verb(added, name)


# ------------------------------------------------------------- arguments that several verbs have

_JSON = _flag("--json", "print JSON")
_SET = _argument(
    "--set SECTION.KEY=VALUE",
    "override one key (may be repeated)",
    dest="overrides",
    action="append",
    default=[],
)
_SPEC = (_argument("spec", "the job's TOML file"), _SET)
_RUN_HELP = "the run's directory, its name, or its spec"
_RUN = _argument("run RUN", _RUN_HELP)
_STEP = _argument("--step N", "of a run: the checkpoint of this step", type=int)
_CHECKPOINT_HELP = "a checkpoint's folder, or a run's directory (then its newest complete one)"
_CHECKPOINT = _argument("checkpoint CKPT", _CHECKPOINT_HELP)
_TENSORS = _argument(
    "pattern PATTERN",
    "tensors by name, as in a shell; without *, ? and [: those that contain it",
    nargs="?",
)
_TOKEN_FILE = _argument("path", "the token file")
_TEXTS = _argument(
    "paths PATH", "files, folders or globs; .txt .md .py .jsonl, also as .gz", nargs="+"
)
_FIELD = _argument(
    "--field NAME",
    'the field of a .jsonl line that holds the text (default: "text")',
    default="text",
)
_TOKENIZERS = "byte, a tokenizer.json, a SentencePiece *.model, or a folder with one of them"
_END_OF_DOCUMENT = _argument("--end-of-document TOKEN", "the token after each document")


def _slot(default: str) -> _Argument:
    return _argument(
        "--slot",
        f"the weights, or a moment of the optimizer (default: {default})",
        choices=["model", "moment1", "moment2", "all"],
        default=default,
    )


# ------------------------------------------------------------------------------------ the verbs

TOKENIZER_VERBS = {
    "train": _verb(
        "hpczero.commands.tokenizer:train",
        "learn a byte-level BPE vocabulary from text",
        _argument("-o --output", "the tokenizer.json to write", required=True),
        _argument("--vocabulary N", "ids (default: 32768)", type=int, default=32_768),
        *(_TEXTS, _FIELD),
    ),
    "show": _verb(
        "hpczero.commands.tokenizer:show",
        "print a tokenizer's facts, and what it makes of a text",
        _argument("tokenizer TOKENIZER", f"{_TOKENIZERS}, or a token file"),
        _argument("--text TEXT", "the text to encode (default: a line of Python)"),
        *(_END_OF_DOCUMENT, _JSON),
    ),
}

DATA_VERBS = {
    "build": _verb(
        "hpczero.commands.data:build",
        "turn text files into a token file",
        _argument("-o --output", "the token file to write (.h5)", required=True),
        _TEXTS,
        _argument(
            "--tokenizer NAME",
            f"how text becomes tokens (default: byte): {_TOKENIZERS}",
            default="byte",
        ),
        _END_OF_DOCUMENT,
        _argument(
            "--validation-fraction",
            "share of the text for validation (default: 0.05)",
            type=float,
            default=0.05,
        ),
        _FIELD,
    ),
    "tokenizer": _verb_group(
        "train a tokenizer, or look into one",
        "Train a tokenizer, or look into one.",
        TOKENIZER_VERBS,
    ),
    "show": _verb(
        "hpczero.commands.data:show", "print the facts of a token file", _TOKEN_FILE, _JSON
    ),
    "verify": _verb(
        "hpczero.commands.data:verify",
        "read a whole token file and compare it with its checksums",
        *(_TOKEN_FILE, _JSON),
    ),
}

CHECKPOINT_VERBS = {
    "ls": _verb(
        "hpczero.commands.checkpoint:ls",
        "list checkpoints, and tell which are complete",
        _argument(
            "paths PATH",
            "runs, folders of runs or of checkpoints (default: runs)",
            nargs="*",
            default=["runs"],
        ),
        _JSON,
    ),
    "show": _verb(
        "hpczero.commands.checkpoint:show",
        "list the tensors of a checkpoint, and the rank and file that hold them",
        *(_CHECKPOINT, _TENSORS, _STEP),
        _flag("--pieces", "also every piece: rank, file, offset, part of the tensor"),
        _JSON,
    ),
    "stats": _verb(
        "hpczero.commands.checkpoint:stats",
        "norm, mean, std, min, max, and the number of NaN and infinities, of each tensor",
        *(_CHECKPOINT, _TENSORS, _STEP, _slot("model"), _JSON),
    ),
    "diff": _verb(
        "hpczero.commands.checkpoint:diff",
        "list the tensors in which two checkpoints differ, and by how much; 0: none, 1: some",
        _argument("a A", _CHECKPOINT_HELP),
        _argument("b B", "the checkpoint to compare it with"),
        _argument(
            "--tolerance T",
            "relative norm of a difference that does not count (default: 0)",
            type=float,
            default=0.0,
        ),
        *(_slot("all"), _JSON),
    ),
    "verify": _verb(
        "hpczero.commands.checkpoint_upkeep:verify",
        "compare a whole checkpoint with its checksums (alone or under mpirun)",
        _argument("checkpoints CKPT", _CHECKPOINT_HELP, nargs="+"),
        *(_STEP, _JSON),
    ),
    "export": _verb(
        "hpczero.commands.weights:export",
        "write the weights as safetensors",
        _CHECKPOINT,
        _argument("output OUT", "a file *.safetensors, or a folder"),
        _argument(
            "--shard-size SIZE",
            "several files of at most this size (5GB), with an index, in the folder OUT",
        ),
        _argument(
            "--dtype",
            "of the weights (default: fp32, as they are)",
            choices=["fp32", "bf16", "fp16"],
            default="fp32",
        ),
        _flag("--hf", "as a model of Hugging Face, in the folder OUT: weights, config, tokenizer"),
        _argument("--architecture NAME", "with --hf: which, where several could be the model"),
        _STEP,
    ),
    "import": _verb(
        "hpczero.commands.weights:import_",
        "make a checkpoint at step 0 from weights in safetensors files",
        _argument("files FILE", "safetensors files, or folders of them", nargs="+"),
        _flag("--hf", "FILE is a model's folder as Hugging Face has them"),
        _argument("--spec", "the job's TOML file, whose model has these tensors", required=True),
        _SET,
        _argument("-o --output RUN", "the run's directory (default: that of the spec)"),
    ),
    "prune": _verb(
        "hpczero.commands.checkpoint_upkeep:prune",
        "remove checkpoints; never the newest complete one",
        _argument("path RUN", "a run's directory, or its folder of checkpoints"),
        _argument("--keep N", "keep the N newest complete ones", type=int),
        _argument(
            "--keep-every K",
            "with --keep: also keep those of steps that K divides",
            type=int,
            default=0,
        ),
        _flag("--incomplete", "also remove those that are incomplete"),
        _flag("--damaged", "also remove those that are damaged"),
        _flag("--set-aside", "also remove those that are set aside"),
        _flag("--dry-run", "only print which ones would be removed"),
    ),
}

SITE_VERBS = {
    "list": _verb("hpczero.commands.site:list_", "list sites and partitions", _JSON),
    "show": _verb(
        "hpczero.commands.site:show",
        "a site's nodes, limits, and defaults of a job there",
        _argument("name SITE", 'as in "perlmutter" or "perlmutter/gpu"'),
        _JSON,
    ),
    "new": _verb(
        "hpczero.commands.site:new",
        "write a profile of this site from the answers of its scheduler",
        _argument("name NAME", "of the site"),
        _argument(
            "-o --output FILE",
            "the file to write (default: sites/NAME.toml in the user's settings)",
        ),
    ),
}

VERBS = {
    "init": _verb(
        "hpczero.commands.check:init",
        "write a commented spec to start from",
        _argument("path", "the file to write (default: spec.toml)", nargs="?", default="spec.toml"),
        _argument("--from-hf DIR", "for the model in this folder, as Hugging Face has them"),
    ),
    "check": _verb(
        "hpczero.commands.check:check",
        "read a spec and print its meaning, without running it",
        *_SPEC,
        _argument("--explain KEY", "print a key's meaning and where its value comes from"),
        _argument("--ranks N", "also lay the job out over N ranks", type=int),
        _argument("--ranks-per-node K", "with --ranks: K ranks on a node", type=int),
        _JSON,
    ),
    "run": _verb(
        "hpczero.commands.run:run",
        "train: mpirun -n N hpczero run spec.toml",
        *_SPEC,
        _at_most_one(
            _flag("--resume", "continue the run that exists; an error if there is none"),
            _flag("--fresh", "start anew; the run that exists is moved aside"),
        ),
        _argument(
            "--progress",
            "how progress is shown (auto: live on a terminal)",
            choices=["auto", "live", "lines"],
            default="auto",
        ),
    ),
    "render": _verb(
        "hpczero.commands.site:render",
        "write the batch script of a job, for Slurm or PBS",
        *_SPEC,
        _argument("-o --output FILE", "write to this file instead of stdout"),
    ),
    "submit": _verb(
        "hpczero.batch.submit:submit",
        "submit a run to Slurm or PBS, as one job or a chain of jobs",
        *_SPEC,
        _flag("--dry-run", "print the script, and submit nothing"),
        _flag(
            "--probe",
            "only a trial, as a run of its own: the same layout for five steps, a save, a restore",
        ),
        _flag("--wait", "return when its jobs have ended; 0 if the run is finished then"),
    ),
    "status": _verb(
        "hpczero.commands.jobs:status",
        "the state of a run, or of all that were submitted",
        _argument(
            "run RUN", f"{_RUN_HELP} (default: all that were submitted, a row each)", nargs="?"
        ),
        _JSON,
    ),
    "runs": _verb(
        "hpczero.commands.jobs:runs",
        "list all runs below a folder, also those started by hand",
        _argument("folder FOLDER", "the folder (default: runs)", nargs="?", default="runs"),
        _JSON,
    ),
    "cancel": _verb(
        "hpczero.commands.jobs:cancel",
        "remove a run's jobs from the queue, and end those that are running",
        _RUN,
    ),
    "logs": _verb(
        "hpczero.commands.logs:logs",
        "print the output of a run's newest job",
        _RUN,
        _flag("-f --follow", "keep printing new output until no job is left"),
        _argument("--rank R", "the node of this rank, and the lines that name it", type=int),
    ),
    "data": _verb_group("work with training data", "Work with training data.", DATA_VERBS),
    "ckpt": _verb_group(
        "inspect checkpoints", "Inspect checkpoints, without MPI and torch.", CHECKPOINT_VERBS
    ),
    "doctor": _verb(
        "hpczero.commands.doctor:doctor",
        "find problems of this machine, and their fixes (alone or under mpirun)",
        _flag("--clean", "remove shared-memory segments that no living process uses"),
        _flag("--prebuild", "compile the kernels for this kind of computer, so that no job has to"),
        _JSON,
    ),
    "site": _verb_group(
        "show known sites", "Show known sites: nodes, queues, launchers.", SITE_VERBS
    ),
    "spec": _verb(
        "hpczero.commands.check:reference",
        "print every key of the spec: type, default, role, meaning",
        _JSON,
        _flag("--markdown", "print the page docs/spec.md"),
    ),
}
