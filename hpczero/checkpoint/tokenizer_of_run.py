"""The tokenizer of a run: the one that its tokens are of, for sampling and export."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.checkpoint.load import Checkpoint
from hpczero.data.token_file import open_token_file, tokenizer_at
from hpczero.data.tokenizer import Tokenizer, tokenizer
from hpczero.errors import HpczeroError, InputError
from hpczero.text import printable

TOKENIZER = "data.tokenizer"  # in a checkpoint's identity: the tokenizer's name


def tokenizer_of_run(checkpoint: Checkpoint, wanted: str | None) -> Tokenizer:
    """Return the tokenizer of the run's data, or the one that is wanted.

    InputError: there is none, it is not the one that the run's tokens are of, or it has more ids
    than the model.
    """
    found = tokenizer_at(wanted) if wanted else _of_data(checkpoint)
    known = checkpoint.identity.get(TOKENIZER)
    if known and known != found.name:
        raise InputError(
            f"{printable(wanted or 'the data')} has the tokenizer {found.name}, and the "
            f"checkpoint's run read tokens of {printable(known, 100)}: the same ids may mean other "
            "texts"
        )
    vocab = checkpoint.model().vocab
    if found.vocabulary > vocab:
        raise InputError(
            f"the tokenizer {found.name} has {found.vocabulary:,} ids, and the model has "
            f"{vocab:,} (model.vocab): it is another model's; --tokenizer names the right one"
        )
    return found


def _sources(table: Mapping[str, Any]) -> list[str]:
    """Return the source of a run's data, or those of a mixture: all have one tokenizer."""
    sources = table.get("sources")
    listed = sources if isinstance(sources, list) else []
    paths = [str(one.get("path", "stdlib")) for one in listed if isinstance(one, dict)]
    return paths or [str(table.get("source", "stdlib"))]


def _of_data(checkpoint: Checkpoint) -> Tokenizer:
    data = checkpoint.content.spec.get("data")
    table = data if isinstance(data, dict) else {}
    sources = [source for source in _sources(table) if source != "synthetic"]
    if not sources:
        raise InputError(
            'the run\'s data are random tokens (data.source = "synthetic"), which stand for no '
            "text: name a tokenizer with --tokenizer"
        )
    problems = []
    for source in sources:
        try:
            if source == "stdlib":
                return tokenizer(str(table.get("tokenizer", "byte")))
            return open_token_file(Path(env.expand(source))).made_with()
        except HpczeroError as error:
            problems.append(str(error))
    raise InputError(
        f"the run's tokenizer is not at hand: {problems[0]}; name a tokenizer, or a token file "
        "that holds it, with --tokenizer"
    )
