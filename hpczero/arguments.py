"""Verbs and arguments of the command line as values, for `verbs.py` and `verb_groups.py`."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

EXIT_CODES = (
    "exit codes: 0 done, 1 failed, 2 the input is wrong, "
    "75 stopped with a checkpoint, to be continued"
)

Argument = Callable[[argparse._ActionsContainer], object]  # adds it to a parser
Verb = Callable[[argparse._SubParsersAction, str], None]  # adds it, under its name, to a parser


def argument(names: str, help: str, **settings: Any) -> Argument:
    """Describe what argparse's `add_argument` takes; names as in "-o --output FILE"."""
    words = names.split()
    if words[-1].isupper():
        settings["metavar"] = words.pop()
    return lambda parser: parser.add_argument(*words, help=help, **settings)


def flag(names: str, help: str) -> Argument:
    return argument(names, help, action="store_true")


def at_most_one(*arguments: Argument) -> Argument:
    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group()
        for one in arguments:
            one(group)

    return add


def verb(carried_out_by: str, description: str, *arguments: Argument) -> Verb:
    def add(verbs: argparse._SubParsersAction, name: str) -> None:
        parser = verbs.add_parser(
            name, help=description, description=description, epilog=EXIT_CODES
        )
        parser.set_defaults(carried_out_by=carried_out_by, list_argument=None)
        for one in arguments:
            added = one(parser)
            if isinstance(added, argparse.Action) and added.nargs in ("*", "+"):
                parser.set_defaults(list_argument=added)

    return add


def verb_group(help: str, description: str, members: Mapping[str, Verb]) -> Verb:
    """Describe a verb that only has verbs of its own, as `hpczero ckpt`."""

    def add(verbs: argparse._SubParsersAction, name: str) -> None:
        add_verbs(verbs.add_parser(name, help=help, description=description), members)

    return add


def add_verbs(parser: argparse.ArgumentParser, verbs: Mapping[str, Verb]) -> None:
    added = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, add in verbs.items():
        add(added, name)


# ------------------------------------------------------------- arguments that several verbs have

JSON = flag("--json", "print JSON")
SET = argument(
    "--set SECTION.KEY=VALUE",
    "override one key (may be repeated)",
    dest="overrides",
    action="append",
    default=[],
)
SPEC = (argument("spec", "the job's TOML file"), SET)
RUN_HELP = "the run's directory, its name, or its spec"
RUN = argument("run RUN", RUN_HELP)
STEP = argument("--step N", "of a run: the checkpoint of this step", type=int)
CHECKPOINT_HELP = "a checkpoint's folder, or a run's directory (then its newest complete one)"
CHECKPOINT = argument("checkpoint CKPT", CHECKPOINT_HELP)
DEVICE = argument(
    "--device",
    "the device to compute on (default: auto, a GPU if there is one)",
    choices=["auto", "cpu", "cuda"],
    default="auto",
)
PRECISION = argument(
    "--precision",
    "number format of the weights (default: the run's; fp32 for fp16 on CPUs)",
    choices=["bf16", "fp16", "fp32"],
)
TOKENIZERS = "byte, a tokenizer.json, a SentencePiece *.model, or a folder with one of them"
