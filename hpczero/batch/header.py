"""The directives of a batch script, read as sbatch and qsub read them: from the top, until the first line that is a command."""

import shlex

from hpczero.errors import InputError
from hpczero.spec.schema import Batch
from hpczero.text import shown

MARKS = {"slurm": "#SBATCH", "pbs": "#PBS"}

# short option -> long one: both say the same thing
_LONG = (
    "A account|a array|b begin|c cpus-per-task|C constraint|d dependency|D chdir|e error|G gpus|H hold|J job-name|L licenses|M clusters"
    "|n ntasks|N nodes|o output|p partition|q qos|s oversubscribe|S core-spec|t time|w nodelist|x exclude"
)
_SLURM = {f"-{short}": f"--{long}" for short, long in (entry.split() for entry in _LONG.split("|"))}
# what submission says itself
_SAID_AT_SUBMISSION = {"slurm": ("--output", "--error", "--comment", "--open-mode"), "pbs": ("-o", "-e", "-h")}
_SEVERAL_AT_ONCE = {"slurm": "--array", "pbs": "-J"}
_SAY_THE_SAME = {"--gpus-per-node": "--gres", "--gpus": "--gres"}


def directives(script: str, scheduler: str) -> list[list[str]]:
    """The words of each."""
    found = []
    for line in script.split("\n"):
        if line.startswith(MARKS[scheduler] + " "):
            found.append(_split(line.removeprefix(MARKS[scheduler])))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def subjects(words: list[str], scheduler: str) -> list[str]:
    """What the options of a directive are about: two about the same contradict each other."""
    found = []
    for place, word in enumerate(words):
        if word.startswith("-"):
            following = words[place + 1] if place + 1 < len(words) else ""
            found += _of_slurm(word) if scheduler == "slurm" else _of_pbs(word, following)
    return found


def _of_slurm(word: str) -> list[str]:
    option = word.partition("=")[0] if word.startswith("--") else _SLURM.get(word[:2], word[:2])
    return [_SAY_THE_SAME.get(option, option)]


def _of_pbs(word: str, following: str) -> list[str]:
    option, value = word[:2], word[2:] or following
    return [f"{option} {part.partition('=')[0]}" for part in value.split(",")] if option in ("-l", "-W") else [option]


def refuse_duplicates(script: str, scheduler: str, batch: Batch) -> None:
    """InputError if one of the user's directives is about what another says already. (sbatch takes the beginning of an option for the whole.)"""
    said = [about for words in directives(script, scheduler) for about in subjects(words, scheduler)]
    several = _SEVERAL_AT_ONCE[scheduler]
    of_user = [("extra_directives", text, text) for text in batch.extra_directives]
    for key, text, directive in [*of_user, *(("pbs_resources", text, f"-l {text}") for text in batch.pbs_resources)]:
        for about in subjects(_split(directive), scheduler):
            if about == several or (len(about) > 3 and several.startswith(about)):
                raise InputError(f"batch.{key}: {shown(text)} makes several jobs of one run: they would write over each other")
            others = [other for other in said if other == about or (about.startswith("--") and other.startswith(about))]
            if len(others) > 1 or about in _SAID_AT_SUBMISSION[scheduler]:
                raise InputError(f"batch.{key}: {shown(text)} says again what is said already ({about}): there is a key for it under [batch]")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"batch.extra_directives: {shown(text)}: {str(error).lower()}") from None
