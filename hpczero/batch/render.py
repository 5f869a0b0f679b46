"""A job's batch script, from the templates.

Whatever comes from a spec goes through a filter: `word` (part of a directive or a comment: harmless characters only), `quote` and `words` (of a
command: quoted for the shell), `variable` (a name), `line` (what the user wrote as shell or as a directive: one line).
"""

import re
import shlex
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import FunctionLoader, StrictUndefined, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.loaders import split_template_path
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpczero import locations
from hpczero.batch import header
from hpczero.batch.job import Job
from hpczero.batch.launch import words
from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.schema import PATTERNS, VARIABLE, WORD
from hpczero.spec.site_profile import profiles
from hpczero.text import printable, shown

_WRONG = (  # what a template's expressions may end with
    *(ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(RecursionError, MemoryError),
)
_LARGEST = 1_000_000  # characters of a script
_LARGEST_POWER = 64
_LONGEST = 10.0  # seconds that a template may take


def render(job: Job) -> str:
    profile = profiles()[job.site.partition("/")[0]]
    environment = _Sandbox(
        loader=FunctionLoader(partial(_template, profile)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"word": _word, "quote": _quote, "words": _words, "variable": _variable, "line": _line}
    template = job.facts.template or f"{job.scheduler}.sh.j2"
    try:
        with _no_longer_than(_LONGEST):
            made = environment.get_template(template).generate(
                job=job, launch=words(job), first=_first(job), **_context(job)
            )
            script = _limited(made)
    except (TemplateError, *_WRONG) as error:
        raise InputError(f"the template {printable(template)} of the site {job.site}: {printable(str(error))}") from error
    header.refuse_duplicates(script, job.scheduler, job.batch)
    return script


class _Sandbox(ImmutableSandboxedEnvironment):
    """Keeps a template from filling the memory by a product."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        texts = [value for value in (left, right) if not isinstance(value, int | float)]
        if texts or (operator == "**" and not abs(right) < _LARGEST_POWER):
            raise SecurityError(f"{operator} of texts and lists, or of large numbers")
        return super().call_binop(context, operator, left, right)


def _template(profile: Path, name: str) -> str | None:
    """Return the text of the template beside the profile, else hpczero's own of this name."""
    for folder in (profile.parent, locations.shared_folder("templates")):
        path = folder.joinpath(*split_template_path(name))
        if path.exists():
            return site_profile.template(path)
    return None


def _limited(made: Iterable[str]) -> str:
    script, length = [], 0
    for part in made:
        script.append(part)
        length += len(part)
        if length > _LARGEST:
            raise SecurityError(f"a script of more than {_LARGEST:,} characters")
    return "".join(script)


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """SecurityError once so many seconds are over (in the main thread, which has signals)."""

    def end(*_: object) -> None:
        raise SecurityError(f"it is not done after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _first(job: Job) -> list[str]:
    return words(replace(job, arguments=job.first)) if job.first else []


def _context(job: Job) -> dict[str, Any]:
    batch = job.batch
    if job.scheduler == "pbs":
        tag = [f"HPCZERO_TAG={job.tag}"] if job.tag else []
        return {"job_number": "PBS_JOBID", "resources": _resources(job), "variables": ",".join([*tag, *batch.env_pass])}
    image = batch.container.removeprefix("shifter:") if batch.container.startswith("shifter:") else ""
    export = "" if batch.env_inherit else ",".join(batch.env_pass) or "NONE"
    request = job.partition.gpu_request
    gpus = f"gpu:{job.gpus_per_node}" if request == "gres" and job.gpus_per_node else job.gpus_per_node
    return {"job_number": "SLURM_JOB_ID", "export": export, "gpu_request": request, "gpus": gpus, "shifter_image": image}


def _resources(job: Job) -> list[str]:
    """What PBS calls a resource list: chunks, one for a node, or where a site has none, the sums over all nodes."""
    batch, part = job.batch, job.partition
    cpus = job.ranks_per_node * batch.cpus_per_rank if batch.cpus_per_rank else part.cpus or job.ranks_per_node
    of_node = {"ncpus": cpus, "mpiprocs": job.ranks_per_node, "ngpus": job.gpus_per_node}
    if part.totals:
        found = [f"{name}={of_node[name] * job.nodes}" for name in ("ncpus", "ngpus") if of_node[name]]
        found += [f"mem={int(batch.mem[:-1]) * job.nodes}{batch.mem[-1]}B"] if batch.mem else []
    else:
        asked = of_node if part.chunk is None else {name: of_node[name] for name in part.chunk}
        chunk = [str(job.nodes), *(f"{name}={count}" for name, count in asked.items() if count)]
        chunk += [f"mem={batch.mem}B"] if batch.mem else []
        found = [f"select={':'.join([*chunk, *([batch.pbs_chunk] if batch.pbs_chunk else [])])}"]
    place = [f"place={batch.pbs_place}"] if batch.pbs_place else []
    return [*found, *place, f"walltime={job.clock}", *batch.pbs_resources]


def _word(value: object) -> str:
    text = str(value)
    if not re.fullmatch(WORD, text) or not text:
        raise InputError(f"{shown(text)} cannot stand in a batch script's directives: it must be {PATTERNS[WORD]}")
    return text


def _quote(value: object) -> str:
    return shlex.quote(_line(value))


def _words(values: Iterable[object]) -> str:
    """Each behind a space, so that none of them is nothing."""
    return "".join(f" {_quote(value)}" for value in values)


def _variable(value: object) -> str:
    if not re.fullmatch(VARIABLE, str(value)):
        raise InputError(f"{shown(str(value))} is no name of an environment variable")
    return str(value)


def _line(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise InputError(f"{shown(text)} cannot stand in a batch script: it has characters that cannot be seen")
    return text
