"""`hpczero ckpt export`, `import`: weights to and from safetensors, without MPI and torch."""

import contextlib
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpczero import env, safe_files
from hpczero.checkpoint import directory
from hpczero.checkpoint.directory import checkpoint_at
from hpczero.checkpoint.export_safetensors import Export
from hpczero.checkpoint.import_safetensors import SafetensorsImport, SourceTensor, tensors_of
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.safetensors import WHOLE_NAME, SafetensorsFile
from hpczero.checkpoint.shard_file import bar
from hpczero.checkpoint.tokenizer_of_run import tokenizer_of_run
from hpczero.checkpoint.views import View
from hpczero.data.special_ids import ids_of_random_tokens, special_ids
from hpczero.data.tokenizer import SENTENCEPIECE, Tokenizer
from hpczero.errors import HpczeroError, InputError
from hpczero.huggingface.folder import CONFIG, Folder, NewFolder
from hpczero.lock import RunLock
from hpczero.safe_files import make_folders, make_own_folder, written_durably
from hpczero.spec.data import SPECIAL_TOKENS
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Model, Spec
from hpczero.text import format_bytes, join_words, printable

_MOST_BYTES = 10**18  # of a file
_SHOWN = 4
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def export(options: Namespace) -> int:
    output = Path(options.output)
    largest = _bytes(options.shard_size) if options.shard_size else 0
    is_file = output.suffix == ".safetensors"
    if is_file and (largest or options.hf):
        raise InputError(
            f"{'--hf' if options.hf else '--shard-size'}: {printable(str(output))} would have to "
            "be a folder, for several files"
        )
    for name in ("architecture", "tokenizer"):
        if getattr(options, name) and not options.hf:
            raise InputError(f"--{name} needs --hf")
    _refuse_no_folder(output.parent if is_file else output)
    with Checkpoint.open(checkpoint_at(Path(options.checkpoint), options.step)) as checkpoint:
        target = _new_folder(checkpoint, options) if options.hf else None
        made = Export(checkpoint, options.dtype, target.views() if target else None)
        try:
            _refuse_without_space(output.parent if is_file else output, made.size)
            if not is_file:
                make_folders(output)
            with contextlib.ExitStack() as stack:
                files = stack.enter_context(target.written(output)) if target else []
                advance = stack.enter_context(bar("writing", made.size))
                if largest:
                    files += made.to_folder(output, largest, advance)
                else:
                    files += made.to_file(output if is_file else output / WHOLE_NAME, advance)
        except OSError as error:
            raise HpczeroError(
                f"{error.filename or output}: {error.strerror} "
                f"({format_bytes(made.size)} are to be written)"
            ) from error
    for path in files:
        print(f"wrote {printable(str(path))}")
    tensors = f"{len(made.entries)} tensors (of them {len(checkpoint.buffers)} buffers)"
    print(f"{tensors}, {format_bytes(made.size)}, weights as {options.dtype}")
    if made.overflows:
        print(
            f"WARN {made.overflows:,} weights are too large for {options.dtype} "
            "and became infinite; bf16 has the range of fp32"
        )
    return 0


def _new_folder(checkpoint: Checkpoint, options: Namespace) -> NewFolder:
    """Return what belongs to the weights; say so if the run's tokenizer is not at hand."""
    model = checkpoint.model()
    said, tokenizer = _said_ids(checkpoint, model), None
    ids = said or _ids_of_random_tokens(checkpoint, model)
    try:
        tokenizer = tokenizer_of_run(checkpoint, options.tokenizer)
        if model.masks:
            known = special_ids(model, tokenizer)
            own = [known[name] for name in SPECIAL_TOKENS[model.family]]
            if not said and max(own) < model.vocab:
                ids = own
            _refuse_unfit_special_ids(model, tokenizer, own, said)
    except InputError as error:
        if options.tokenizer:
            raise
        print(f"WARN no tokenizer is exported: {error}")
        tokenizer = None
    if model.family == "bert" and tokenizer and SENTENCEPIECE in tokenizer.files:
        print(
            "WARN transformers puts no [CLS] and [SEP] around the texts that it reads by the run's "
            "SentencePiece model: they are to be put there"
        )
    if model.family == "t5" and not ids:
        print(
            f"WARN {CONFIG} says decoder_start_token_id = 0, pad_token_id = 0 and eos_token_id = 1,"
            " as published models of T5 have them: those of the run are not known (--tokenizer "
            "names its tokenizer)"
        )
    return NewFolder.of(model, options.architecture, options.dtype, tokenizer, ids)


def _said_ids(checkpoint: Checkpoint, model: Model) -> list[int]:
    """Return data.special_ids of the run; none if they are the tokenizer's.

    InputError: they are no ids of the model.
    """
    said = _data_of(checkpoint).get("special_ids") if model.masks else None
    if said is None or said == []:
        return []
    are_ids = isinstance(said, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < model.vocab
        for one in said
    )
    if not are_ids or len(said) != 3 or len(set(said)) != 3:
        raise InputError(
            f"{printable(str(checkpoint.folder))}: data.special_ids = {printable(str(said), 100)} "
            f"must be three numbers from 0 to {model.vocab - 1}, the ids of "
            f"{join_words(list(SPECIAL_TOKENS[model.family]))}"
        )
    return list(said)


def _ids_of_random_tokens(checkpoint: Checkpoint, model: Model) -> list[int]:
    data = _data_of(checkpoint)
    is_random = not data.get("sources") and data.get("source") == "synthetic"
    return list(ids_of_random_tokens(model)) if model.masks and is_random else []


def _data_of(checkpoint: Checkpoint) -> dict[str, Any]:
    data = checkpoint.content.spec.get("data")
    return data if isinstance(data, dict) else {}


def _refuse_unfit_special_ids(
    model: Model, tokenizer: Tokenizer, own: list[int], said: list[int]
) -> None:
    """Raise InputError if an exported tokenizer would not mark texts as the run did."""
    names = join_words(list(SPECIAL_TOKENS[model.family]))
    if said and said != own:
        raise InputError(
            f"the run's ids of {names} are {said} (data.special_ids), and those of "
            f"the tokenizer are {own}: name one with --tokenizer that has them"
        )
    if max(own) >= model.vocab:
        raise InputError(
            f"the ids of {names} would be {own} after the tokenizer's own, and the model has "
            f"{model.vocab} (model.vocab): name one with --tokenizer that has them"
        )
    # of a T5 it may lack the sentinels, which its settings add
    in_text = own[:2] if model.family == "t5" else own
    if SENTENCEPIECE in tokenizer.files and max(in_text) >= tokenizer.vocabulary:
        raise InputError(
            f"the SentencePiece model of the run lacks some of {names}, and cannot "
            f"be given more: their ids are {own}"
        )


def import_(options: Namespace) -> int:
    spec = load(options.spec, options.overrides).spec
    run = Path(options.output) if options.output else Path(env.expand(spec.output)) / spec.name
    checkpoints = run / "checkpoints"
    with contextlib.ExitStack() as stack:
        found, views, unused = _found(options, spec, stack)
        adoption = SafetensorsImport(spec, found, views)
        if _is_begun(run, checkpoints):
            raise InputError(
                f"{printable(str(run))} has checkpoints already: name another run's directory"
            )
        try:
            _refuse_without_space(run, adoption.room)
            make_own_folder(run)
            with RunLock(run):
                _refuse_another_run(run / "spec.toml", spec)
                with bar("reading", adoption.size) as advance:
                    path = adoption.save(checkpoints, advance)
                # only now: with the spec alone, a run would begin from random weights
                if not (run / "spec.toml").exists():
                    with written_durably(run / "spec.toml") as file:
                        file.write(to_toml(spec).encode())
        except OSError as error:
            raise HpczeroError(f"{error.filename or checkpoints}: {error.strerror}") from error
    print(
        f"made {printable(str(path))}: {len(adoption.parameters)} tensors, "
        f"{len(adoption.buffers)} buffers, moments of zero"
    )
    if unused:
        print(f"left out, as the model computes or shares them: {_listed(unused)}")
    if adoption.overflows:
        print(f"WARN {adoption.overflows:,} weights are too large for fp32 and became infinite")
    print(
        "`hpczero run` with this spec begins there, at step 0, "
        f"if its run directory is {printable(str(run))}"
    )
    return 0


def _found(
    options: Namespace, spec: Spec, stack: contextlib.ExitStack
) -> tuple[dict[str, SourceTensor], list[View] | None, list[str]]:
    """Return the tensors of the files, what of the model they are, and the names of others."""
    if not options.hf:
        files = [stack.enter_context(SafetensorsFile(path)) for path in _safetensors(options.files)]
        return tensors_of(files), None, []
    if len(options.files) != 1:
        raise InputError(f"--hf takes one model's folder, not {len(options.files)}")
    folder = Folder.read(Path(options.files[0]))
    folder.refuse_another(spec.model)
    found = folder.tensors(stack)
    if folder.has_embedding_as_head:
        print(
            "WARN the head begins as the embedding, which it is in the files, and is trained apart "
            "from it: hpczero has no shared one with unscaled logits (scale_decoder_outputs)"
        )
    return found, folder.views(), folder.unused


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name, 100) for name in names[:_SHOWN]) + more


def _is_begun(run: Path, checkpoints: Path) -> bool:
    """Return True if the run has checkpoints.

    An import that was killed before its last action leaves step 0 and no spec: return False. The
    same command sets its checkpoint aside, and goes on.
    """
    ignored = set() if (run / "spec.toml").exists() else {0}
    return bool(set(directory.steps(checkpoints)) - ignored)


def _refuse_another_run(path: Path, spec: Spec) -> None:
    """Raise InputError if the spec in the run's directory has another identity."""
    if not path.exists():
        return
    other = [
        difference.key
        for difference in differences(load(path).spec, spec)
        if difference.role == "identity" and difference.key != "name"
    ]
    if other:
        raise InputError(
            f"{printable(str(path.parent))} is another run's directory, "
            f"with another {', '.join(other)}"
        )


def _safetensors(paths: list[str]) -> list[Path]:
    """Return the files; a folder stands for all .safetensors files in it."""
    files = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"{printable(str(path))} has no .safetensors files")
        files += inside
    return files


def _bytes(text: str) -> int:
    """Parse a size such as "5GB" or "500 MB"; GB are 10^9 bytes, as for safetensors."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)B?\s*", text.upper())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, OverflowError):
        size = 0
    if not 1 <= size < _MOST_BYTES:
        raise InputError(
            f"--shard-size {printable(text, 60)}: a number of bytes, such as 500MB or 5GB"
        )
    return size


def _refuse_no_folder(folder: Path) -> None:
    """Raise InputError if something else has the folder's name, or that of one above it."""
    there = safe_files.nearest_there(folder.absolute())
    if not os.path.isdir(there):
        raise InputError(
            f"{printable(str(there))} is no folder, and is left as it is: name another one"
        )


def _refuse_without_space(path: Path, size: int) -> None:
    free = safe_files.free_bytes(path.absolute())
    if free < size:
        raise InputError(
            f"{printable(str(path))}: {format_bytes(size)} are to be written, "
            f"and {format_bytes(free)} are free there"
        )
