"""Counting the tokens that `data.source` has for a job, before it runs.

This runs on login nodes, without torch; numpy is imported for token files only.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import printable, toml_repr

IDS = {"byte": 257}  # vocabularies of `corpus.tokenizer`, which needs numpy


@dataclass(frozen=True)
class Supply:
    """Tokens of each split, 0 if unknown; `problem` tells why."""

    wanted: int  # tokens that the job's steps read
    train: int = 0
    validation: int = 0
    tokenizer: str = ""
    problem: str = ""

    @property
    def epochs(self) -> float | None:
        """Times that the job reads each token; None if unknown."""
        return self.wanted / self.train if self.train else None

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"epochs": self.epochs}

    def in_words(self) -> str:
        if self.problem or not self.epochs:
            return self.problem
        has = f"{self.train:,} tokens to train on, {self.validation:,} for validation"
        reads = f"the job reads {self.wanted:,}: {_epochs(self.epochs)}"
        return f"{has} ({self.tokenizer}); {reads}"


def count_tokens(spec: Spec, must_be_here: bool = False) -> Supply:
    """Count the tokens; InputError if the run would refuse what is there.

    A file that is not here may be where the job runs, unless it `must_be_here`.
    """
    wanted = spec.train.steps * spec.train.global_batch * spec.model.seq_len
    if spec.data.source == "synthetic":
        return Supply(wanted, problem="random tokens, no text")
    if spec.data.source == "stdlib":
        return _library(spec, wanted)
    path = Path(env.expand(spec.data.source)).absolute()
    if not _is_there(path):
        unset = ", and what follows the $ is not set" if "$" in str(path) else ""
        missing = f"there is no file {printable(str(path))} here{unset}"
        if must_be_here:
            way_out = "make one with `hpczero data build -o NAME.h5 TEXT...`"
            raise InputError(f"data.source = {toml_repr(spec.data.source)}: {missing}: {way_out}")
        return Supply(wanted, problem=missing)
    from hpczero.data.dataset import refuse_unfit
    from hpczero.data.token_file import open_token_file

    file = open_token_file(path)
    refuse_unfit(file, spec)
    train, validation = (len(file.splits[split].tokens) for split in ("train", "validation"))
    ids = f"{printable(file.tokenizer)}, {file.vocabulary:,} ids"
    return Supply(wanted, train, validation, ids)


def _library(spec: Spec, wanted: int) -> Supply:
    """Raise the error that a run would raise once the token file is built."""
    needed = IDS[spec.data.tokenizer]
    if spec.model.vocab < needed:
        raise InputError(
            f'data.source = "stdlib": model.vocab = {spec.model.vocab} is too small for the'
            f" {needed} ids of the tokenizer '{spec.data.tokenizer}': "
            f"set model.vocab = {needed} or more"
        )
    text = "text of the running Python's library, a token file that is made on first use"
    return Supply(wanted, problem=text)


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        name = printable(str(path))
        raise InputError(f"token file {name} cannot be read: {error.strerror}") from error
    return True


def _epochs(epochs: float) -> str:
    return f"{epochs:.3g} epochs" if epochs >= 0.0095 else "less than 0.01 epochs"
