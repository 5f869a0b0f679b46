"""Tokens that a source has for a job, counted before it runs.

On login nodes too, so that numpy is imported for token files only.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero import env
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import printable, toml_repr

if TYPE_CHECKING:
    from hpczero.data.token_source import TokenSource

IDS = {"byte": 257}  # vocabularies of [data] tokenizer; `tokenizer.py` needs numpy


@dataclass(frozen=True)
class Supply:
    """Tokens of each split, 0 if unknown; `problem` tells why."""

    wanted: int  # tokens that the job's steps read
    train: int = 0
    validation: int = 0
    tokenizer: str = ""
    problem: str = ""
    sources: "Mapping[str, Supply]" = field(default_factory=dict)  # of a mixture

    @property
    def epochs(self) -> float | None:
        """Times that the job reads each token; None if unknown."""
        return self.wanted / self.train if self.train else None

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"epochs": self.epochs}

    def in_lines(self, name: str) -> list[str]:
        """Return a line for each source; `name`: of the only one."""
        if not self.sources:
            return [f"{toml_repr(name)}: {self.in_words()}"]
        lines = [f"{toml_repr(name)}: {one.in_words()}" for name, one in self.sources.items()]
        return [*lines, f"all of these: {self.problem}"] if self.problem else lines

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
    wanted = spec.train.steps * spec.train.global_batch * spec.text_len
    if spec.data.sources:
        return _of_mixture(spec, wanted, must_be_here)
    supply = _of_source(spec, wanted, must_be_here)
    if supply.train:
        _opened(spec)
    return supply


def _opened(spec: Spec) -> "TokenSource":
    """Open files that are here as a run does, which refuses what cannot be masked or mixed."""
    from hpczero.data.dataset import open_source

    return open_source(spec, share=lambda value: value)


def _of_source(spec: Spec, wanted: int, must_be_here: bool) -> Supply:
    """Count the tokens of `data.source`, of which the job reads so many."""
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
    from hpczero.data.plain_formats import is_plain
    from hpczero.data.plain_source import refuse_unfit_tokens
    from hpczero.data.plain_tokens import open_plain_tokens
    from hpczero.data.token_file import open_token_file

    if is_plain(path):
        tokens = open_plain_tokens(path, spec.data.validation_fraction)
        refuse_unfit_tokens(tokens, spec)
        train, validation = (len(tokens.splits[split]) for split in ("train", "validation"))
        return Supply(wanted, train, validation, f"tokens of {tokens.form}")
    file = open_token_file(path)
    refuse_unfit(file, spec)
    train, validation = (len(file.splits[split].tokens) for split in ("train", "validation"))
    ids = f"{printable(file.tokenizer)}, {file.vocabulary:,} ids"
    return Supply(wanted, train, validation, ids)


def _of_mixture(spec: Spec, wanted: int, must_be_here: bool) -> Supply:
    """Return what there is of each source, and what the job reads of it by its weight."""
    weights = sum(one.weight for one in spec.data.sources)
    found = {
        one.path: _of_source(
            spec.of_source(one), round(wanted * one.weight / weights), must_be_here
        )
        for one in spec.data.sources
    }
    train, validation = (
        sum(getattr(one, split) for one in found.values()) for split in ("train", "validation")
    )
    are_here = train and all(one.train or path == "synthetic" for path, one in found.items())
    problem = _early_end(spec, _opened(spec)) if are_here else ""
    return Supply(wanted, train, validation, problem=problem, sources=found)


def _early_end(spec: Spec, source: "TokenSource") -> str:
    """Return after how many samples the epochs of a new run's sources end, if the steps do not."""
    from hpczero.data.mixture import Mixture

    assert isinstance(source, Mixture), source
    samples, end = spec.train.steps * spec.train.global_batch, source.end
    if end >= samples:
        return ""
    return f"their epochs end after {end:,} samples, and the steps take {samples:,}: a run refuses"


def _library(spec: Spec, wanted: int) -> Supply:
    """Raise the error that a run would raise once the token file is built."""
    needed = of_text = IDS[spec.data.tokenizer]
    special = ""
    if spec.model.masks:
        said = spec.data.special_ids
        needed = max(*said, of_text - 1) + 1 if said else of_text + spec.model.special_tokens
        special = " and the special tokens of samples"
    if spec.model.vocab < needed:
        raise InputError(
            f'data.source = "stdlib": model.vocab = {spec.model.vocab} is too small for the'
            f" {of_text} ids of the tokenizer '{spec.data.tokenizer}'{special}: "
            f"set model.vocab = {needed} or more"
        )
    text = "text of the running Python's library, a token file that is made on first use"
    return Supply(wanted, problem=text)


def _is_there(path: Path) -> bool:
    """Return True if the file is there, or the pair of files that the path begins the names of."""
    for name in (path, path.with_name(f"{path.name}.idx")):
        try:
            name.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            said = printable(str(name))
            raise InputError(f"token file {said} cannot be read: {error.strerror}") from error
        return True
    return False


def _epochs(epochs: float) -> str:
    return f"{epochs:.3g} epochs" if epochs >= 0.0095 else "less than 0.01 epochs"
