"""`hpczero eval`: the loss of a checkpoint's model on token files, alone or under mpirun."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from hpczero import env
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.tokenizer_of_run import TOKENIZER
from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.dataset import FileSource, library_token_file
from hpczero.data.plain_formats import is_plain
from hpczero.data.plain_source import plain_source, refuse_unreadable_tokens
from hpczero.data.plain_tokens import open_plain_tokens
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.data.token_source import TokenSource
from hpczero.errors import InputError
from hpczero.inference.decoder import Decoder
from hpczero.inference.evaluate import EvaluationSet, RankWork, evaluate
from hpczero.inference.load_model import load_model, open_checkpoint, precision_of
from hpczero.planner.volumes import resolved
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Parallel, Spec, Zero
from hpczero.text import format_bytes, format_count, join_words, log_line, printable
from hpczero.train import malloc, setup

_TOKENS = 2048  # of a batch, if nothing else is asked for
_SECONDS_BETWEEN_LINES = 10.0


def eval_(options: argparse.Namespace) -> int:
    with World.start() as world:
        try:
            _check(options)
            figures = _evaluated(world, options)
        except InputError as error:
            if world.rank == 0:
                print(f"hpczero: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        if world.rank == 0:
            print(json.dumps(figures, indent=2) if options.json else "\n".join(_lines(figures)))
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, least in (("sequences", 0), ("batch", 0), ("seq_len", 0), ("tensor", 1)):
        if getattr(options, name) < least:
            option = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise InputError(f"{option}: it must be {least} or more")


@dataclass(frozen=True)
class _Loaded:
    """The model on this rank, and its part of the work."""

    spec: Spec
    module: Decoder
    work: RankWork
    dtype: torch.dtype


@dataclass(frozen=True)
class _Text:
    """Tokens to evaluate; `sizes`: bytes of each id, where they are known."""

    path: Path
    tokenizer: str
    source: TokenSource
    sizes: torch.Tensor | None = None


def _evaluated(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Return what is to be printed; InputError on all ranks. Collective."""
    if world.size % options.tensor:
        fitting = [str(size) for size in range(1, world.size + 1) if world.size % size == 0]
        raise InputError(
            f"--tensor {options.tensor} does not divide the {format_count(world.size, 'rank')} "
            f"given: --tensor {join_words(fitting, 'or')}, or another number of ranks"
        )
    checkpoint = world.run_on_all(lambda: open_checkpoint(options.checkpoint, options.step))
    with checkpoint:
        spec = world.run_on_all(lambda: _spec_of(checkpoint, options))
        texts = _open_texts(world, checkpoint, spec, options.files)
        wanted = ("train", "validation") if options.split == "all" else (options.split,)
        parts = world.run_on_all(lambda: _parts(texts, wanted, spec))
        loaded = _load(world, checkpoint, spec, options)
    facts = [_of_split(world, loaded, text, split, options.sequences) for text, split in parts]
    return {
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "seq_len": spec.seq_len,
        "documents": spec.data.documents,
        "precision": str(loaded.dtype).removeprefix("torch."),
        "ranks": world.size,
        "results": facts,
    }


def _spec_of(checkpoint: Checkpoint, options: argparse.Namespace) -> Spec:
    """Return the run's spec, laid out for an evaluation."""
    try:
        spec = Spec.model_validate_json(json.dumps(checkpoint.content.spec))
    except ValidationError as error:
        name = printable(str(checkpoint.folder))
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{name}: this version cannot read its spec: {printable(key)}: {first['msg']}; use the "
            "version of hpczero that made the checkpoint"
        ) from error
    longest = spec.model.seq_len
    if options.seq_len > longest:
        raise InputError(
            f"--seq-len {options.seq_len}: the model's sequences have {longest} tokens at most"
        )
    data = {
        "documents": options.documents or spec.data.documents,
        "seq_len": options.seq_len or spec.data.seq_len,
    }
    laid_out = spec.model_copy(
        update={
            "data": spec.data.model_copy(update=data),
            "train": spec.train.model_copy(update={"device": options.device}),
            "parallel": Parallel(tensor=options.tensor),
            "zero": Zero(stage=0, node_shared=False),
        }
    )
    if problems := contradictions(laid_out):
        raise InputError("; ".join(problem.text for problem in problems))
    return laid_out


def _open_texts(world: World, checkpoint: Checkpoint, spec: Spec, paths: list[str]) -> list[_Text]:
    """Open files of tokens, or those of the run; refuse another vocabulary's. Collective."""
    sources = paths or spec.data.paths
    if "synthetic" in sources:
        raise InputError("random tokens (data.source = \"synthetic\") say nothing of a model: "
                         "name token files")  # fmt: skip
    first = world.rank == 0
    if "stdlib" in sources:  # rank 0 makes it if need be
        world.run_on_all(lambda: library_token_file(spec) if first else None)
    known = checkpoint.identity.get(TOKENIZER)

    def opened(source: str) -> _Text:
        path = library_token_file(spec) if source == "stdlib" else Path(env.expand(source))
        if is_plain(path):
            tokens = open_plain_tokens(path.absolute(), spec.data.validation_fraction)
            refuse_unreadable_tokens(tokens, spec)
            return _Text(tokens.path, tokens.tokenizer, plain_source(tokens, spec))
        file = open_token_file(path)
        if known and file.tokenizer != known:
            raise InputError(
                f"{printable(source)} has tokens of {file.tokenizer}, and the checkpoint's run "
                f"read those of {printable(known, 100)}: their ids mean other texts"
            )
        largest = max(split.largest for split in file.splits.values())
        if largest >= spec.model.vocab:
            raise InputError(
                f"{printable(source)} holds token {largest}, and the model has {spec.model.vocab} "
                f"(model.vocab): it is of another vocabulary ({file.tokenizer})"
            )
        whole = FileSource(file, spec.seq_len, spec.data.documents)
        return _Text(file.path, file.tokenizer, whole, _sizes(file))

    return world.run_on_all(lambda: [opened(source) for source in sources])


def _parts(texts: list[_Text], wanted: tuple[str, ...], spec: Spec) -> list[tuple[_Text, str]]:
    """Return the splits of each text that have sequences; refuse a text that has none."""
    found = []
    for text in texts:
        there = [split for split in wanted if text.source.windows(split)]
        if not there:
            tokens = text.source.describe()["tokens"]
            counts = [f"{tokens[split]:,} in {split}" for split in wanted]
            raise InputError(
                f"{printable(str(text.path))} has too few tokens for a sequence of {spec.seq_len}: "
                f"{join_words(counts)}; --split names the other part, --seq-len a shorter sequence"
            )
        found += [(text, split) for split in there]
    return found


def _load(world: World, checkpoint: Checkpoint, spec: Spec, options: argparse.Namespace) -> _Loaded:
    """Load the weights on all ranks. Collective."""
    setup.use_kernels(world)
    malloc.keep_free_memory()
    spec = setup.select_device(world, spec)
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    setup.share_cores(world, grid.sharing_layers(world.rank))
    data = world.group("data", grid.ranks(world.rank, "data"))
    tensor = None
    if grid.size("tensor") > 1:
        tensor = world.group("tensor", grid.ranks(world.rank, "tensor"))
    dtype = precision_of(checkpoint, options.precision, world.device)
    batch = options.batch or max(1, _TOKENS // spec.seq_len)
    logits = batch * spec.seq_len * spec.model.vocab // options.tensor * (dtype.itemsize + 4)
    module = world.run_on_all(
        lambda: load_model(checkpoint, dtype, world.device, tensor, logits, world.local_size)
    )
    return _Loaded(spec, module, RankWork(data, tensor, batch, world.device), dtype)


def _of_split(
    world: World, loaded: _Loaded, text: _Text, split: str, windows: int
) -> dict[str, Any]:
    """Evaluate one split of a file; the facts to print. Collective."""
    spec = loaded.spec
    chosen = EvaluationSet(
        text.source, split, spec.seq_len, spec.data.documents, spec.seed, windows, text.sizes
    )
    name = str(text.path)
    began = time.perf_counter()
    progress = _progress(name, split, chosen.windows) if world.rank == 0 else lambda done: None
    figures = evaluate(loaded.module, chosen, loaded.work, progress)
    seconds = time.perf_counter() - began
    if not figures.tally.weight:
        raise InputError(
            f"{printable(name)}, {split}: none of the tokens that were read has a target "
            f"(documents {spec.data.documents}): more --sequences, or --documents packed"
        )
    if not isfinite(figures.tally.loss):
        raise InputError(
            f"{printable(name)}, {split}: the loss is {figures.tally.loss}: `hpczero ckpt stats` "
            "shows whether the weights are finite"
        )
    facts = {"path": name, "split": split, "tokenizer": text.tokenizer, **figures.facts(chosen)}
    speed = figures.tally.windows * spec.seq_len / seconds
    entropy = text.source.unigram_entropy(split)
    return facts | {"unigram_entropy": entropy, "seconds": seconds, "tokens_per_second": speed}


def _sizes(file: TokenFile) -> torch.Tensor | None:
    """Return the bytes of each id; None where the file does not hold a tokenizer that knows."""
    try:
        sizes = file.made_with().bytes_of_ids()
    except InputError:
        return None
    return None if sizes is None else torch.from_numpy(sizes)


def _progress(name: str, split: str, windows: int) -> Callable[[int], None]:
    """Return a function that says from time to time how many of rank 0's windows are done."""
    done = 0
    said = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            line = log_line("eval", {"path": name, "split": split, "sequences": done,
                                     "of_all_ranks": windows})  # fmt: skip
            print(line, file=sys.stderr, flush=True)

    return advance


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    how = f"sequences of {figures['seq_len']}, documents {figures['documents']}"
    name = printable(figures["checkpoint"])
    yield f"{name} (step {figures['step']:,}), {how}, {figures['precision']}"
    for facts in figures["results"]:
        error = facts["standard_error"]
        spread = f" ± {error:.4f} (standard error)" if error else ""
        per_byte = facts["bits_per_byte"]
        of_bytes = "not known of this tokenizer"
        if per_byte is not None:
            of_bytes = f"{per_byte:.4f} over {format_bytes(facts['bytes'])} of text"
        yield f"{printable(facts['path'])}, {facts['split']}:"
        yield (
            f"  loss            {facts['loss']:.4f}{spread} nats a token, over {facts['tokens']:,} "
            f"of {facts['tokens_of_split']:,} (unigram entropy {facts['unigram_entropy']:.4f})"
        )
        yield f"  perplexity      {facts['perplexity']:.4g}"
        yield f"  bits per byte   {of_bytes}"
        yield f"  token accuracy  {100 * facts['accuracy']:.2f} %"
