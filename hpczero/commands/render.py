"""hpczero render: write a job script without handing it over."""

import sys
from argparse import Namespace
from pathlib import Path

from hpczero.batch.job import Here, plan
from hpczero.batch.render import render as script_of
from hpczero.data.supply import look
from hpczero.errors import InputError
from hpczero.safe_files import write_text
from hpczero.spec import site_profile
from hpczero.spec.load import load
from hpczero.text import counted, printable, shown


# The verbs about batch jobs. They run on login nodes: no torch, no mpi4py.
def render(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    overrides = [word for override in options.overrides for word in ("--set", override)]
    supply = look(spec)
    job = plan(spec, Here.now(), ("run", str(Path(options.spec).absolute()), *overrides))
    script = script_of(job)
    if options.output:
        _write(Path(options.output), script)
    else:
        print(script, end="")
    print(
        f"hpczero: {job.site}: {counted(job.ranks, 'rank')} on {counted(job.nodes, 'node')}, {job.cost}",
        file=sys.stderr,
    )
    print(f"hpczero: data.source = {shown(spec.data.source)}: {supply.in_words()}", file=sys.stderr)
    for line in site_profile.left_out():
        print(f"hpczero: {line}", file=sys.stderr)
    if spec.batch.chain > 1:
        print(
            f"hpczero: batch.chain = {spec.batch.chain}: it is hpczero submit that puts so many into the queue; this is one",
            file=sys.stderr,
        )
    return 0


def _write(path: Path, script: str) -> None:
    try:
        write_text(path, script)
    except OSError as error:
        raise InputError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
