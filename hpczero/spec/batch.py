"""The table [batch] of the spec: the job under a batch system."""

from typing import Literal

from pydantic import StrictBool

from hpczero.spec.table import (
    CONTAINER,
    MEMORY,
    WALLTIME,
    WORD,
    Directive,
    Line,
    Site,
    Table,
    Text,
    Variable,
    Word,
    key,
)


class Batch(Table):
    """The job under a batch system: `hpczero render`, `hpczero submit`."""

    site: Site = key(
        "auto", "site", '"site" or "site/partition" (hpczero site list); "auto": by host name'
    )
    cluster: Text = key(
        "",
        "site",
        "whose file says how long a step takes (hpczero cluster list), or a file *.toml; "
        "empty: nothing is predicted",
    )
    scheduler: Literal["auto", "slurm", "pbs"] = key(
        "auto", "site", "the batch system; auto: the site's, or the one that is installed here"
    )
    launcher: Literal["auto", "srun", "mpirun", "mpiexec"] = key(
        "auto",
        "site",
        "what starts the ranks (mpiexec: that of PALS); auto: srun under Slurm, mpirun under PBS",
    )
    launch_options: tuple[Line, ...] = key(
        (), "site", 'more words for the launcher, as in ["--mpi=pmi2"]', strict=False
    )
    nodes: int = key(1, "site", "computers", ge=1, le=1_000_000)
    ranks_per_node: int = key(
        0, "site", "ranks on each; 0: one for each GPU, or one", ge=0, le=100_000
    )
    cpus_per_rank: int = key(
        0, "site", "as the scheduler counts; 0: a share of the node, if known", ge=0, le=100_000
    )
    gpus_per_node: int = key(0, "site", "0: all that the site's partition has", ge=0, le=1000)
    gpu_select: Literal["auto", "visible", "wrapper", "closest"] = key(
        "auto",
        "site",
        "visible: a rank sees all and takes its own; wrapper: it sees only its own; "
        "closest: Slurm gives it the nearest",
    )
    bind: str = key(
        "auto",
        "site",
        '"auto", "none", "cores", or as the launcher takes it: "mask_cpu:7e,7e00"',
        pattern=WORD,
        min_length=1,
    )
    mem: str = key("", "site", "memory of a node; empty: not requested", pattern=MEMORY)
    walltime: str = key("1h", "site", "how long a job may take", pattern=WALLTIME, min_length=1)
    account: str = key("", "site", "account that pays for the job", pattern=WORD)
    queue: str = key("", "site", "queue or partition", pattern=WORD)
    qos: str = key("", "site", "Slurm: quality of service", pattern=WORD)
    constraint: str = key("", "site", "Slurm: features of the nodes", pattern=WORD)
    reservation: str = key("", "site", "Slurm: reservation", pattern=WORD)
    exclude: str = key("", "site", "Slurm: nodes to avoid", pattern=WORD)
    pbs_chunk: str = key(
        "", "site", 'PBS: more resources of each chunk, as in "system=polaris"', pattern=WORD
    )
    pbs_place: str = key("", "site", 'PBS: placement, as in "scatter"', pattern=WORD)
    pbs_resources: tuple[Word, ...] = key(
        (), "site", 'PBS: more resources of the job, as in ["filesystems=home:eagle"]', strict=False
    )
    command: tuple[Line, ...] = key(
        (),
        "site",
        "a training program of your own that each rank runs in place of `hpczero run`, as in "
        '["python", "train.py", "{spec}"]; {spec}: path of the job\'s spec',
        strict=False,
    )
    chain: int = key(
        1, "site", "jobs to submit, one after the other, until the run is finished", ge=1, le=1000
    )
    max_stalled: int = key(
        3, "site", "jobs of a chain without a new checkpoint after which it ends", ge=1, le=1000
    )
    after: str = key("", "site", "number of a job that must have ended first", pattern=WORD)
    begin: str = key("", "site", "not before this time, as the scheduler writes it", pattern=WORD)
    mail: str = key("", "site", "address that gets a message at the job's end", pattern=WORD)
    modules: tuple[Word, ...] = key(
        (), "site", "environment modules that the job loads", strict=False
    )
    venv: Text = key(
        "auto", "site", 'virtual environment; "auto": the one that renders, if any; empty: none'
    )
    setup: tuple[Line, ...] = key(
        (), "site", "lines of shell that the job runs before it starts the ranks", strict=False
    )
    env: dict[Variable, Text] = key(
        {}, "site", "variables that are set in the job (written into the script: no secrets)"
    )
    env_pass: tuple[Variable, ...] = key(
        (),
        "site",
        "names of variables that the job gets from the submission; no value is written, "
        "but PBS shows them to every user",
        strict=False,
    )
    env_inherit: StrictBool = key(
        False, "site", "give the job the whole environment of the submission"
    )
    container: str = key("", "site", "image that the ranks run in", pattern=CONTAINER)
    container_options: tuple[Line, ...] = key(
        (), "site", 'more words for its command, as in ["--bind", "/scratch"]', strict=False
    )
    extra_directives: tuple[Directive, ...] = key(
        (), "site", "more directives, without #SBATCH or #PBS", strict=False
    )
