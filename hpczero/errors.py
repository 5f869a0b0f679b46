"""What can go wrong, and the exit code that each kind of failure ends the program with."""

import re

_LONG = re.compile(r"\S{501,}")
_LONGEST_LINE = 4000  # characters
_ACTED_ON = re.compile(r"[^\t\n -~]")  # or not: what is no ASCII may well be printable


def for_terminal(text: str) -> str:
    """Lines that a terminal shows as they are, whatever a file's names and values have in them.

    What it would act on is written as an escape; a value of more than 500 characters is cut.
    """
    cut = _LONG.sub(lambda found: found.group()[:499] + "…", text)
    return "\n".join(map(_line_for_terminal, cut.split("\n")))


def log_for_terminal(text: str) -> str:
    """Return the text of a log with its lines and tabs as they are, and nothing left out.

    What else a terminal would act on is written as an escape.
    """
    return _ACTED_ON.sub(lambda found: escaped(found.group()), text.replace("\r\n", "\n"))


def _line_for_terminal(line: str) -> str:
    return escaped(line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…")


def escaped(line: str) -> str:
    """Write whatever a terminal would act on as an escape.

    That is control characters, line ends and right-to-left marks.
    """
    if line.isprintable():
        return line
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode("ascii")
        for one in line
    )


class HpczeroError(Exception):
    """A failure with one clear message: all the numbers, and the way out."""

    exit_code = 1

    def __str__(self) -> str:
        return for_terminal(super().__str__())


class InputError(HpczeroError):
    """The user's input (spec, arguments, files) is wrong; nothing was written."""

    exit_code = 2


class Stopped(HpczeroError):
    """Stopped on request, with a checkpoint: to be continued."""

    exit_code = 75
