"""The output of a scheduler's program."""

import sys

from hpczero.batch import command


def test_names_in_an_old_encoding_are_read_as_well_as_they_can_be() -> None:
    latin = "import sys; sys.stdout.buffer.write('caf\u00e9\\n'.encode('latin-1'))"
    assert command.output([sys.executable, "-c", latin]) == "caf\ufffd\n"
