"""`hpczero data build --submit`: a token file is made by a job in the queue."""

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from hpczero.batch.submit import submit_run
from hpczero.errors import InputError
from hpczero.spec.load import load
from hpczero.spec.schema import Batch, Spec, Train

_UNFIT = re.compile(r"[^A-Za-z0-9._-]")  # for the name of a run


def submit_build(spec_path: str, output: Path, words: Sequence[str], options: Namespace) -> int:
    """Submit `hpczero data build` with these words, to where a spec's [batch] says.

    It is one process on one node, which starts as many as the job has cores (or as --workers says).
    Its run directory lies beside the output.
    """
    given = load(spec_path, options.overrides).spec
    batch = given.batch
    cores = options.workers or batch.cpus_per_rank * (batch.ranks_per_node or 1)
    of_job = {
        "nodes": 1,
        "ranks_per_node": 1,
        "cpus_per_rank": cores,
        "gpus_per_node": 0,
        "gpu_select": "auto",
        "max_stalled": 1000,  # a build goes on without checkpoints
        "command": ["python3", "-m", "hpczero", "data", "build", *words],
    }
    try:
        placed = Batch.model_validate_json(json.dumps(batch.model_dump(mode="json") | of_job))
    except ValidationError as error:
        raise InputError(
            f"a job cannot have these words: {error.errors()[0]['msg']}: names of files and fields "
            "must be printable"
        ) from error
    spec = Spec(
        name=f"{_UNFIT.sub('-', output.stem).lstrip('._-')[:80] or 'data'}.build",
        output=str(output.absolute().parent),
        train=Train(device="cpu"),
        batch=placed,
    )
    options.probe = options.wait = False
    return submit_run(spec, options)
