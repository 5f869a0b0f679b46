"""The verb `init`: a commented spec to start from; it runs without torch and mpi4py."""

import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from hpczero.errors import InputError
from hpczero.safe_files import write_new
from hpczero.spec.load import to_start_from
from hpczero.text import printable

_LONG = 4096  # tokens of a sequence


def init(options: Namespace) -> int:
    path = Path(options.path)
    values: dict[str, Any] = {"name": _run_name(path.stem)}
    if options.from_hf:
        values |= _values_of(Path(options.from_hf))
    try:
        write_new(path, to_start_from(values))
    except FileExistsError:
        raise InputError(
            f"{printable(options.path)} exists already and is left as it is: name another file"
        ) from None
    except OSError as error:
        raise InputError(f"{printable(options.path)} cannot be written: {error.strerror}") from None
    name = printable(shlex.quote(options.path))
    print(f"wrote {name}; edit it, then")
    print(f"  hpczero check {name}             what the job is")
    if options.from_hf:
        source = printable(shlex.quote(options.from_hf))
        print(f"  hpczero ckpt import --hf {source} --spec {name}   begin with its weights")
    print(f"  mpirun -n 2 hpczero run {name}   train it")
    return 0


def _values_of(folder: Path) -> dict[str, Any]:
    """Return the keys of a spec for the model in a folder of Hugging Face."""
    from hpczero.huggingface.folder import Folder

    model = Folder.read(folder).model
    keys = model.model_dump(exclude={"attention"})  # dense, as in all folders that can be read
    values = {f"model.{name}": value for name, value in keys.items()}
    if model.seq_len > _LONG:
        values["data.seq_len"] = _LONG  # the model takes more than most can train on
    return values


def _run_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:100] or "run"
