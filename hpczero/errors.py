"""What can go wrong, and the exit code that each kind of failure ends the program with."""


class HpczeroError(Exception):
    """A failure with one clear message: all the numbers, and the way out."""

    exit_code = 1


class InputError(HpczeroError):
    """The user's input (spec, arguments, files) is wrong; nothing was written."""

    exit_code = 2


class Stopped(HpczeroError):
    """Stopped on request, with a checkpoint: to be continued."""

    exit_code = 75
