"""Write a job's batch script: the words that start its ranks, put into the site's template.

Every value from a spec passes a filter of the template:
    word             part of a directive or a comment: harmless characters only
    quote, words     part of a command: quoted for the shell
    variable         the name of a variable
    line             one line of shell, or a directive, that the user wrote
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
from hpczero.batch.scheduler import SCHEDULERS
from hpczero.errors import InputError
from hpczero.spec import site_profile
from hpczero.spec.schema import Batch
from hpczero.spec.site_profile import profiles
from hpczero.spec.table import PATTERNS, VARIABLE, WORD
from hpczero.text import printable, toml_repr

_TEMPLATE_ERRORS = (  # besides jinja2's own, what a template's expressions may raise
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
    first = launch_command(replace(job, program=job.first)) if job.first else []
    try:
        with _no_longer_than(_LONGEST):
            pieces = environment.get_template(template).generate(
                job=job, launch=launch_command(job), first=first, **_CONTEXTS[job.scheduler](job)
            )
            script = _limited(pieces)
    except (TemplateError, *_TEMPLATE_ERRORS) as error:
        raise InputError(
            f"the template {printable(template)} of the site {job.site}: {printable(str(error))}"
        ) from error
    refuse_duplicates(script, job.scheduler, job.batch)
    return script


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which no product or power can fill the memory."""

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


def _limited(pieces: Iterable[str]) -> str:
    script = ""
    for piece in pieces:
        script += piece
        if len(script) > _LARGEST:
            raise SecurityError(f"a script of more than {_LARGEST:,} characters")
    return script


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Raise SecurityError after so many seconds; only the main thread can, which has signals."""

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


def _pbs_context(job: BatchJob) -> dict[str, Any]:
    tag = [f"HPCZERO_TAG={job.tag}"] if job.tag else []
    return {
        "job_number": "PBS_JOBID",
        "task": "PBS_ARRAY_INDEX",
        "resources": _resources(job),
        "variables": ",".join([*tag, *job.batch.env_pass]),
    }


_SLURM_TASK = "{SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # the variable's name follows a "$"


def _slurm_context(job: BatchJob) -> dict[str, Any]:
    batch = job.batch
    kind, _, image = batch.container.partition(":")
    export = "" if batch.env_inherit else ",".join(batch.env_pass) or "NONE"
    request = job.partition.gpu_request
    gpus: int | str = job.gpus_per_node
    return {
        "job_number": _SLURM_TASK if job.tasks or job.is_task else "SLURM_JOB_ID",
        "task": "SLURM_ARRAY_TASK_ID",
        "export": export,
        "gpu_request": request,
        "gpus": f"gpu:{gpus}" if request == "gres" and gpus else gpus,
        "shifter_image": image if kind == "shifter" else "",
    }


# scheduler -> the function that returns what its template takes besides the job and its commands
_CONTEXTS = {"slurm": _slurm_context, "pbs": _pbs_context}


def _resources(job: BatchJob) -> list[str]:
    """Return a PBS resource list: chunks, one a node, or the sums over all nodes."""
    batch = job.batch
    partition = job.partition
    cpus = partition.cpus or job.ranks_per_node
    if batch.cpus_per_rank:
        cpus = job.ranks_per_node * batch.cpus_per_rank
    of_node = {"ncpus": cpus, "mpiprocs": job.ranks_per_node, "ngpus": job.gpus_per_node}
    if partition.totals:
        resources = [
            f"{name}={of_node[name] * job.nodes}" for name in ("ncpus", "ngpus") if of_node[name]
        ]
        if batch.mem:
            resources.append(f"mem={int(batch.mem[:-1]) * job.nodes}{batch.mem[-1]}B")
    else:
        names = of_node if partition.chunk is None else partition.chunk
        chunk = [str(job.nodes), *(f"{name}={of_node[name]}" for name in names if of_node[name])]
        if batch.mem:
            chunk.append(f"mem={batch.mem}B")
        if batch.pbs_chunk:
            chunk.append(batch.pbs_chunk)
        resources = [f"select={':'.join(chunk)}"]
    if batch.pbs_place:
        resources.append(f"place={batch.pbs_place}")
    return [*resources, f"walltime={job.clock}", *batch.pbs_resources]


def _word(value: object) -> str:
    text = str(value)
    if not re.fullmatch(WORD, text) or not text:
        raise InputError(
            f"{toml_repr(text)} cannot stand in a batch script's directives: "
            f"it must be {PATTERNS[WORD]}"
        )
    return text


def _quote(value: object) -> str:
    return shlex.quote(_line(value))


def _words(values: Iterable[object]) -> str:
    """Quote each value behind a space, so that none of them vanishes."""
    return "".join(f" {_quote(value)}" for value in values)


def _variable(value: object) -> str:
    if not re.fullmatch(VARIABLE, str(value)):
        raise InputError(f"{toml_repr(str(value))} is no name of an environment variable")
    return str(value)


def _line(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise InputError(
            f"{toml_repr(text)} cannot stand in a batch script: "
            "it has characters that cannot be seen"
        )
    return text


# The command that starts a job's ranks (pure): launcher, choice of the GPU, container, program.
#
#     srun mpirun mpiexec    the launcher says how many ranks, where, and on which cores each
#     bash -c '...' words    a wrapper shows each rank its own GPU (gpu_select = "wrapper")
#     apptainer, shifter     the container
#     python3 -m hpczero     the program, or the user's own (batch.command)

# launcher -> the variable with a process's number on its node
_LOCAL_RANK = {
    "srun": "SLURM_LOCALID",
    "mpiexec": "PALS_LOCAL_RANKID",
    "mpirun": "{OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}",  # Open MPI, MPICH and Intel MPI
}


def launch_command(job: BatchJob) -> list[str]:
    """Return the command that starts the ranks."""
    launcher = {"srun": _srun, "mpirun": _mpirun, "mpiexec": _mpiexec}[job.launcher](job)
    return [*launcher, *job.batch.launch_options, *_wrapper(job), *_container(job), *job.program]


def _srun(job: BatchJob) -> list[str]:
    """Return srun's options; a rank that is killed ends the others.

    The number of CPUs is repeated, since srun has not taken it from the job since Slurm 22.05.
    """
    command = ["srun", "--kill-on-bad-exit=1", f"--nodes={job.nodes}", f"--ntasks={job.ranks}"]
    command.append(f"--ntasks-per-node={job.ranks_per_node}")
    if job.cpus_per_rank:
        command.append(f"--cpus-per-task={job.cpus_per_rank}")
    bind = job.batch.bind
    if bind != "auto" or job.cpus_per_rank:
        command.append(f"--cpu-bind={'cores' if bind == 'auto' else bind}")
    if job.gpus_per_node and job.gpu_select == "closest":
        command += ["--gpus-per-task=1", "--gpu-bind=closest"]
    elif job.gpus_per_node:
        command.append("--gpu-bind=none")
    return command


def _mpirun(job: BatchJob) -> list[str]:
    """Return options that Open MPI and MPICH share; both take the nodes from the job.

    By default they bind a rank to one core at a time, and ranks here have threads.
    """
    command = ["mpirun", "-n", str(job.ranks)]
    if job.partition.totals:  # such a job does not say how many ranks a node has
        command += ["--map-by", f"ppr:{job.ranks_per_node}:node"]
    return [*command, "--bind-to", "none"]


def _mpiexec(job: BatchJob) -> list[str]:
    command = ["mpiexec", "-n", str(job.ranks), "--ppn", str(job.ranks_per_node)]
    if job.cpus_per_rank:
        command += ["--depth", str(job.cpus_per_rank)]
    bind = job.batch.bind
    if bind != "auto" or job.cpus_per_rank:
        command += ["--cpu-bind", {"auto": "depth", "cores": "core"}.get(bind, bind)]
    return command


def _wrapper(job: BatchJob) -> list[str]:
    if not job.gpus_per_node or job.gpu_select != "wrapper":
        return []
    order = " ".join(job.partition.gpu_order or map(str, range(job.gpus_per_node)))
    gpu = f"${{gpus[rank % {job.gpus_per_node}]}}"
    script = (
        f"gpus=({order}); rank=${_LOCAL_RANK[job.launcher]}; "
        f'export {job.partition.gpu_variable}={gpu}; exec "$@"'
    )
    return ["bash", "-c", script, "one-gpu"]


def _container(job: BatchJob) -> list[str]:
    kind, _, image = job.batch.container.partition(":")
    options = job.batch.container_options
    if kind == "apptainer":
        return ["apptainer", "exec", *options, image]
    return ["shifter", *options] if kind == "shifter" else []  # its image is a directive


# The directives of a script, read as sbatch and qsub read them: from the top to the first command.
def directives(script: str, scheduler: str) -> list[list[str]]:
    """Return the words of each directive."""
    mark = SCHEDULERS[scheduler].MARK
    split = []
    for line in script.split("\n"):
        if line.startswith(mark + " "):
            split.append(_split(line.removeprefix(mark)))
        elif line.strip() and not line.startswith("#"):
            break
    return split


def subjects(words: list[str], scheduler: str) -> list[str]:
    """Return the subject of each option of a directive: two on the same subject contradict."""
    names = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            names += SCHEDULERS[scheduler].subjects(word, following)
    return names


def refuse_duplicates(script: str, scheduler: str, batch: Batch) -> None:
    """Raise InputError if a directive of the user repeats the subject of another one.

    sbatch takes the beginning of a long option for the option.
    """
    present = [
        subject for words in directives(script, scheduler) for subject in subjects(words, scheduler)
    ]
    array = SCHEDULERS[scheduler].SEVERAL_AT_ONCE
    of_user = [("extra_directives", text, text) for text in batch.extra_directives]
    of_user += [("pbs_resources", text, f"-l {text}") for text in batch.pbs_resources]
    for key, text, directive in of_user:
        for subject in subjects(_split(directive), scheduler):
            if subject == array or (len(subject) > 3 and array.startswith(subject)):
                raise InputError(
                    f"batch.{key}: {toml_repr(text)} makes several jobs of one run: "
                    "they would write over each other"
                )
            is_long = subject.startswith("--")
            others = [
                one for one in present if one == subject or (is_long and one.startswith(subject))
            ]
            if len(others) > 1 or subject in SCHEDULERS[scheduler].SAID_AT_SUBMISSION:
                raise InputError(
                    f"batch.{key}: {toml_repr(text)} says again what is said already ({subject}): "
                    "there is a key for it under [batch]"
                )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"batch.extra_directives: {toml_repr(text)}: {str(error).lower()}"
        ) from None
