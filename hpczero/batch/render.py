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

from hpczero import env
from hpczero.batch.job import BatchJob
from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.schema import PATTERNS, VARIABLE, WORD, Batch
from hpczero.spec.site_profile import profiles
from hpczero.text import printable, shown

_WRONG = (  # what a template's expressions may end with
    *(ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    *(RecursionError, MemoryError),
)
_LARGEST = 1_000_000  # characters of a script
_LARGEST_POWER = 64
_LONGEST = 10.0  # seconds that a template may take


def render(job: BatchJob) -> str:
    profile = profiles()[job.site.partition("/")[0]]
    environment = _Sandbox(
        loader=FunctionLoader(partial(_template, profile)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "word": _word,
        "quote": _quote,
        "words": _words,
        "variable": _variable,
        "line": _line,
    }
    template = job.facts.template or f"{job.scheduler}.sh.j2"
    try:
        with _no_longer_than(_LONGEST):
            made = environment.get_template(template).generate(
                job=job, launch=words(job), first=_first(job), **_context(job)
            )
            script = _limited(made)
    except (TemplateError, *_WRONG) as error:
        raise InputError(
            f"the template {printable(template)} of the site {job.site}: {printable(str(error))}"
        ) from error
    refuse_duplicates(script, job.scheduler, job.batch)
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
    for folder in (profile.parent, env.shared_folder("templates")):
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


def _first(job: BatchJob) -> list[str]:
    return words(replace(job, arguments=job.first)) if job.first else []


def _context(job: BatchJob) -> dict[str, Any]:
    batch = job.batch
    if job.scheduler == "pbs":
        tag = [f"HPCZERO_TAG={job.tag}"] if job.tag else []
        return {
            "job_number": "PBS_JOBID",
            "resources": _resources(job),
            "variables": ",".join([*tag, *batch.env_pass]),
        }
    image = (
        batch.container.removeprefix("shifter:") if batch.container.startswith("shifter:") else ""
    )
    export = "" if batch.env_inherit else ",".join(batch.env_pass) or "NONE"
    request = job.partition.gpu_request
    gpus = (
        f"gpu:{job.gpus_per_node}" if request == "gres" and job.gpus_per_node else job.gpus_per_node
    )
    return {
        "job_number": "SLURM_JOB_ID",
        "export": export,
        "gpu_request": request,
        "gpus": gpus,
        "shifter_image": image,
    }


def _resources(job: BatchJob) -> list[str]:
    """What PBS calls a resource list: chunks, one for a node, or where a site has none, the sums over all nodes."""
    batch, part = job.batch, job.partition
    cpus = (
        job.ranks_per_node * batch.cpus_per_rank
        if batch.cpus_per_rank
        else part.cpus or job.ranks_per_node
    )
    of_node = {"ncpus": cpus, "mpiprocs": job.ranks_per_node, "ngpus": job.gpus_per_node}
    if part.totals:
        found = [
            f"{name}={of_node[name] * job.nodes}" for name in ("ncpus", "ngpus") if of_node[name]
        ]
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
        raise InputError(
            f"{shown(text)} cannot stand in a batch script's directives: it must be {PATTERNS[WORD]}"
        )
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
        raise InputError(
            f"{shown(text)} cannot stand in a batch script: it has characters that cannot be seen"
        )
    return text


# The command that starts a job's ranks, as words (pure): launcher, choice of the GPU, container, program.
#
#     srun mpirun mpiexec    the launcher says how many ranks, where, and which cores each may use
#     bash -c '...' words    a wrapper shows each rank its own GPU (gpu_select = "wrapper")
#     apptainer, shifter     the container
#     python3 -m hpczero     the program
# launcher -> what it calls a process's number on its node
_LOCAL_RANK = {
    "srun": "SLURM_LOCALID",
    "mpiexec": "PALS_LOCAL_RANKID",
    "mpirun": "{OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}",  # Open MPI, MPICH and Intel MPI
}


def words(job: BatchJob) -> list[str]:
    launcher = {"srun": _srun, "mpirun": _mpirun, "mpiexec": _mpiexec}[job.launcher](job)
    return [
        *launcher,
        *job.batch.launch_options,
        *_wrapper(job),
        *_container(job),
        "python3",
        "-m",
        "hpczero",
        *job.arguments,
    ]


def _srun(job: BatchJob) -> list[str]:
    """The number of CPUs is said again: srun stopped taking it from the job in 22.05. A rank that is killed ends the others."""
    found = [
        "srun",
        "--kill-on-bad-exit=1",
        f"--nodes={job.nodes}",
        f"--ntasks={job.ranks}",
        f"--ntasks-per-node={job.ranks_per_node}",
    ]
    found += [f"--cpus-per-task={job.cpus_per_rank}"] if job.cpus_per_rank else []
    bind = job.batch.bind
    if bind != "auto" or job.cpus_per_rank:
        found.append(f"--cpu-bind={'cores' if bind == 'auto' else bind}")
    if job.gpus_per_node:
        found += (
            ["--gpus-per-task=1", "--gpu-bind=closest"]
            if job.gpu_select == "closest"
            else ["--gpu-bind=none"]
        )
    return found


def _mpirun(job: BatchJob) -> list[str]:
    """Open MPI's and MPICH's take nodes and ranks per node from the job. They bind to one core at a time by default, and ranks here have threads."""
    found = ["mpirun", "-n", str(job.ranks)]
    found += (
        ["--map-by", f"ppr:{job.ranks_per_node}:node"] if job.partition.totals else []
    )  # such a job does not say how many ranks a node has
    return [*found, "--bind-to", "none"]


def _mpiexec(job: BatchJob) -> list[str]:
    found = ["mpiexec", "-n", str(job.ranks), "--ppn", str(job.ranks_per_node)]
    found += ["--depth", str(job.cpus_per_rank)] if job.cpus_per_rank else []
    bind = job.batch.bind
    if bind != "auto" or job.cpus_per_rank:
        found += ["--cpu-bind", {"auto": "depth", "cores": "core"}.get(bind, bind)]
    return found


def _wrapper(job: BatchJob) -> list[str]:
    if not job.gpus_per_node or job.gpu_select != "wrapper":
        return []
    order = " ".join(job.partition.gpu_order or map(str, range(job.gpus_per_node)))
    own = f"${{gpus[rank % {job.gpus_per_node}]}}"
    script = f'gpus=({order}); rank=${_LOCAL_RANK[job.launcher]}; export {job.partition.gpu_variable}={own}; exec "$@"'
    return ["bash", "-c", script, "one-gpu"]


def _container(job: BatchJob) -> list[str]:
    kind, _, image = job.batch.container.partition(":")
    options = job.batch.container_options
    if kind == "apptainer":
        return ["apptainer", "exec", *options, image]
    return ["shifter", *options] if kind == "shifter" else []  # its image is a directive


# The directives of a batch script, read as sbatch and qsub read them: from the top, until the first line that is a command.
MARKS = {"slurm": "#SBATCH", "pbs": "#PBS"}

# short option -> long one: both say the same thing
_LONG = (
    "A account|a array|b begin|c cpus-per-task|C constraint|d dependency|D chdir|e error|G gpus|H hold|J job-name|L licenses|M clusters"
    "|n ntasks|N nodes|o output|p partition|q qos|s oversubscribe|S core-spec|t time|w nodelist|x exclude"
)
_SLURM = {f"-{short}": f"--{long}" for short, long in (entry.split() for entry in _LONG.split("|"))}
# what submission says itself
_SAID_AT_SUBMISSION = {
    "slurm": ("--output", "--error", "--comment", "--open-mode"),
    "pbs": ("-o", "-e", "-h"),
}
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
    return (
        [f"{option} {part.partition('=')[0]}" for part in value.split(",")]
        if option in ("-l", "-W")
        else [option]
    )


def refuse_duplicates(script: str, scheduler: str, batch: Batch) -> None:
    """InputError if one of the user's directives is about what another says already. (sbatch takes the beginning of an option for the whole.)"""
    said = [
        about for words in directives(script, scheduler) for about in subjects(words, scheduler)
    ]
    several = _SEVERAL_AT_ONCE[scheduler]
    of_user = [("extra_directives", text, text) for text in batch.extra_directives]
    for key, text, directive in [
        *of_user,
        *(("pbs_resources", text, f"-l {text}") for text in batch.pbs_resources),
    ]:
        for about in subjects(_split(directive), scheduler):
            if about == several or (len(about) > 3 and several.startswith(about)):
                raise InputError(
                    f"batch.{key}: {shown(text)} makes several jobs of one run: they would write over each other"
                )
            others = [
                other
                for other in said
                if other == about or (about.startswith("--") and other.startswith(about))
            ]
            if len(others) > 1 or about in _SAID_AT_SUBMISSION[scheduler]:
                raise InputError(
                    f"batch.{key}: {shown(text)} says again what is said already ({about}): there is a key for it under [batch]"
                )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"batch.extra_directives: {shown(text)}: {str(error).lower()}") from None
