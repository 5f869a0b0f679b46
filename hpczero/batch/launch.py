"""The command that starts a job's ranks, as words (pure): launcher, choice of the GPU, container, program.

    srun mpirun mpiexec    the launcher says how many ranks, where, and which cores each may use
    bash -c '...' words    a wrapper shows each rank its own GPU (gpu_select = "wrapper")
    apptainer, shifter     the container
    python3 -m hpczero     the program
"""

from hpczero.batch.job import Job

# launcher -> what it calls a process's number on its node
_LOCAL_RANK = {
    "srun": "SLURM_LOCALID",
    "mpiexec": "PALS_LOCAL_RANKID",
    "mpirun": "{OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}",  # Open MPI, MPICH and Intel MPI
}


def words(job: Job) -> list[str]:
    launcher = {"srun": _srun, "mpirun": _mpirun, "mpiexec": _mpiexec}[job.launcher](job)
    return [*launcher, *job.batch.launch_options, *_wrapper(job), *_container(job), "python3", "-m", "hpczero", *job.arguments]


def _srun(job: Job) -> list[str]:
    """The number of CPUs is said again: srun stopped taking it from the job in 22.05. A rank that is killed ends the others."""
    found = ["srun", "--kill-on-bad-exit=1", f"--nodes={job.nodes}", f"--ntasks={job.ranks}", f"--ntasks-per-node={job.ranks_per_node}"]
    found += [f"--cpus-per-task={job.cpus_per_rank}"] if job.cpus_per_rank else []
    bind = job.batch.bind
    if bind != "auto" or job.cpus_per_rank:
        found.append(f"--cpu-bind={'cores' if bind == 'auto' else bind}")
    if job.gpus_per_node:
        found += ["--gpus-per-task=1", "--gpu-bind=closest"] if job.gpu_select == "closest" else ["--gpu-bind=none"]
    return found


def _mpirun(job: Job) -> list[str]:
    """Open MPI's and MPICH's take nodes and ranks per node from the job. They bind to one core at a time by default, and ranks here have threads."""
    found = ["mpirun", "-n", str(job.ranks)]
    found += ["--map-by", f"ppr:{job.ranks_per_node}:node"] if job.partition.totals else []  # such a job does not say how many ranks a node has
    return [*found, "--bind-to", "none"]


def _mpiexec(job: Job) -> list[str]:
    found = ["mpiexec", "-n", str(job.ranks), "--ppn", str(job.ranks_per_node)]
    found += ["--depth", str(job.cpus_per_rank)] if job.cpus_per_rank else []
    bind = job.batch.bind
    if bind != "auto" or job.cpus_per_rank:
        found += ["--cpu-bind", {"auto": "depth", "cores": "core"}.get(bind, bind)]
    return found


def _wrapper(job: Job) -> list[str]:
    if not job.gpus_per_node or job.gpu_select != "wrapper":
        return []
    order = " ".join(job.partition.gpu_order or map(str, range(job.gpus_per_node)))
    own = f"${{gpus[rank % {job.gpus_per_node}]}}"
    script = f'gpus=({order}); rank=${_LOCAL_RANK[job.launcher]}; export {job.partition.gpu_variable}={own}; exec "$@"'
    return ["bash", "-c", script, "one-gpu"]


def _container(job: Job) -> list[str]:
    kind, _, image = job.batch.container.partition(":")
    options = job.batch.container_options
    if kind == "apptainer":
        return ["apptainer", "exec", *options, image]
    return ["shifter", *options] if kind == "shifter" else []  # its image is a directive
