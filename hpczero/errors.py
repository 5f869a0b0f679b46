"""The kinds of failure with their exit codes, and text that is safe to show on a terminal."""

import re

_LONG = re.compile(r"\S{501,}")
_LONGEST_LINE = 4000  # characters
_MAYBE_UNPRINTABLE = re.compile(r"[^\t\n -~]")  # `escaped` keeps those that are printable


def for_terminal(text: str) -> str:
    """Return lines that are safe on a terminal, whatever a file's names and values hold.

    Control characters are `escaped`; words of more than 500 characters and lines of more than
    4000 are cut.
    """
    cut = _LONG.sub(lambda match: match.group()[:499] + "…", text)
    return "\n".join(map(_line_for_terminal, cut.split("\n")))


def log_for_terminal(text: str) -> str:
    """Return the whole text of a log, `escaped` but for its line ends and tabs."""
    return _MAYBE_UNPRINTABLE.sub(lambda match: escaped(match.group()), text.replace("\r\n", "\n"))


def _line_for_terminal(line: str) -> str:
    return escaped(line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…")


def escaped(line: str) -> str:
    """Replace control characters, line ends and right-to-left marks by escapes as in "\\x1b"."""
    return line if line.isprintable() else "".join(map(_escaped_character, line))


def _escaped_character(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class HpczeroError(Exception):
    """A failure with one clear message: every number, and what to do about it."""

    exit_code = 1

    def __str__(self) -> str:
        return for_terminal(super().__str__())


class InputError(HpczeroError):
    """The user's input (spec, arguments, files) is wrong; nothing was written."""

    exit_code = 2


class Stopped(HpczeroError):
    """The run stopped on request, with a checkpoint, and can be resumed."""

    exit_code = 75
