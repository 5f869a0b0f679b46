"""The verbs about batch jobs. They run on login nodes: no torch, no mpi4py."""

import sys
from argparse import Namespace
from pathlib import Path

from hpczero.batch.job import Here, plan
from hpczero.batch.render import render as script_of
from hpczero.errors import InputError
from hpczero.spec.load import load
from hpczero.spec.show import printable


def render(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    overrides = [word for override in options.overrides for word in ("--set", override)]
    job = plan(spec, Here.now(), ("run", str(Path(options.spec).absolute()), *overrides))
    script = script_of(job)
    if options.output:
        _write(Path(options.output), script)
    else:
        print(script, end="")
    print(f"hpczero: {job.site}: {job.ranks:,} ranks on {job.nodes:,} nodes, {job.cost}", file=sys.stderr)
    if spec.batch.chain > 1:
        print(f"hpczero: batch.chain = {spec.batch.chain}: it is hpczero submit that puts so many into the queue; this is one", file=sys.stderr)
    return 0


def _write(path: Path, script: str) -> None:
    try:
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
