"""`hpczero ckpt ls`, `show`, `stats`, `diff`: look into checkpoints, without MPI and torch."""

import itertools
import json
import math
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from hpczero.checkpoint.directory import checkpoint_at, folders_of_checkpoints
from hpczero.checkpoint.listing import COMPLETE, Listed, listed
from hpczero.checkpoint.load import Checkpoint, Difference, Statistics
from hpczero.checkpoint.piece_table import Tensor
from hpczero.checkpoint.shard_file import SLOTS, WIDTH, bar
from hpczero.errors import InputError
from hpczero.text import first_few, format_bytes, join_words, printable

# name in --slot -> the slot's number


def ls(options: Namespace) -> int:
    folders = [folder for path in options.paths for folder in folders_of_checkpoints(Path(path))]
    checkpoints = [checkpoint for folder in folders for checkpoint in listed(folder)]
    if options.json:
        print(json.dumps([checkpoint.as_data() for checkpoint in checkpoints], indent=2))
        return 0
    run = None
    for checkpoint in checkpoints:
        if checkpoint.run != run:
            run = checkpoint.run
            print(printable(str(run)))
        print(_line(checkpoint))
    if not checkpoints:
        print("no checkpoints in " + ", ".join(printable(str(path)) for path in options.paths))
    return 0


def _line(checkpoint: Listed) -> str:
    sizes = (checkpoint.grid or {}).items()
    grid = " x ".join(f"{printable(axis, 20)} {size}" for axis, size in sizes if size > 1)
    if not grid and checkpoint.ranks == 1:
        grid = "1 rank"
    if checkpoint.state != COMPLETE and checkpoint.problem:
        grid += f"  ({printable(checkpoint.problem)})"
    name = printable(checkpoint.path.name)
    created = printable(checkpoint.created or "")
    size = format_bytes(checkpoint.size)
    return f"  {name:24} {checkpoint.state:10} {size:>8}  {created:25}  {grid}".rstrip()


def show(options: Namespace) -> int:
    with _opened(options.checkpoint, options.step) as checkpoint:
        tensors = _matching(checkpoint, options.pattern)
        if options.json:
            print(json.dumps(_facts(checkpoint, tensors), indent=2))
            return 0
        if not options.pattern:
            print("\n".join(_summary(checkpoint)))
        width = max((len(tensor.name) for tensor in tensors), default=0)
        for tensor in tensors:
            pieces = list(_pieces(checkpoint, tensor))
            ranks = len({piece["rank"] for piece in pieces})
            files = len({piece["file"] for piece in pieces})
            shape = f"{list(tensor.shape)!s:20} {tensor.size:>15,}"
            print(f"  {tensor.name:{width}}  float32 {shape}  {ranks} ranks, {files} files")
            if options.pieces:
                print("".join(map(_piece_line, pieces)), end="")
        for name, values in checkpoint.buffers.items():
            if _matches(name, options.pattern):
                shape = f"{list(values.shape)!s:20} {values.size:>15,}"
                print(f"  {printable(name):{width}}  {values.dtype} {shape}  buffer")
    return 0


def stats(options: Namespace) -> int:
    with _opened(options.checkpoint, options.step) as checkpoint:
        tensors = _matching(checkpoint, options.pattern)
        slots = _slots(checkpoint, options.slot)
        rows: list[dict[str, Any]] = []
        with bar("reading", sum(tensor.size for tensor in tensors) * WIDTH * len(slots)) as advance:
            for slot, tensor in itertools.product(slots, tensors):
                statistics = Statistics()
                for values in checkpoint[f"/{slot}/{tensor.name}"].stretches():
                    statistics.add(values)
                    advance(values.nbytes)
                head = {"slot": slot, "name": tensor.name, "elements": tensor.size}
                rows.append(head | statistics.as_data())
    if options.json:
        _print_as_json(rows)
        return 0
    columns = ["norm", "mean", "std", "min", "max", "nan", "inf"]
    names = [f"{row['slot']}/{row['name']}" if len(slots) > 1 else row["name"] for row in rows]
    width = max(map(len, names), default=0)
    print(f"{'':{width}}" + "".join(f"  {column:>10}" for column in columns))
    for name, row in zip(names, rows, strict=True):
        print(f"{name:{width}}" + "".join(f"  {_number(row[column])}" for column in columns))
    return 0


def diff(options: Namespace) -> int:
    if not options.tolerance >= 0:
        raise InputError(f"--tolerance {options.tolerance}: it must be 0 or more")
    with _opened(options.a, None) as a, _opened(options.b, None) as b:
        if _slots(a, options.slot) != _slots(b, options.slot):
            raise InputError(
                f"they keep other states of optimizers: {first_few(list(a.slots))}, and "
                f"{first_few(list(b.slots))}: --slot model compares the weights"
            )
        rows = list(_differences(a, b, _slots(a, options.slot), options.tolerance))
        if options.json:
            _print_as_json(rows)
        else:
            for row in rows:
                print(_difference_text(row))
            equal = f"equal: {len(a.table.tensors)} tensors"
            print(f"{len(rows)} tensors differ" if rows else equal)
    return 1 if rows else 0


def _differences(
    a: Checkpoint, b: Checkpoint, slots: Sequence[str], tolerance: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor that differs: in shape, in values, then the buffers."""
    in_a = {tensor.name: tensor for tensor in a.table.tensors}
    in_b = {tensor.name: tensor for tensor in b.table.tensors}
    comparable = []
    for name in in_a | in_b:
        shape_a = _shape(in_a.get(name))
        shape_b = _shape(in_b.get(name))
        if shape_a == shape_b:
            comparable.append(in_a[name])
        else:
            yield {"tensor": f"/{SLOTS[0]}/{name}", "shape_a": shape_a, "shape_b": shape_b}
    elements = sum(tensor.size for tensor in comparable) * len(slots)
    with bar("comparing", elements * WIDTH) as advance:
        for slot, tensor in itertools.product(slots, comparable):
            name = f"/{slot}/{tensor.name}"
            difference = Difference()
            for values, reference in zip(a[name].stretches(), b[name].stretches(), strict=True):
                difference.add(values, reference)
                advance(values.nbytes)
            if difference.relative > tolerance:
                yield {
                    "tensor": name,
                    "max_abs": difference.largest,
                    "relative": difference.relative,
                    "elements": difference.differing,
                }
    for name in sorted(a.buffers.keys() | b.buffers.keys()):
        one = a.buffers.get(name)
        other = b.buffers.get(name)
        if (
            one is None
            or other is None
            or one.dtype != other.dtype
            or not np.array_equal(one, other)
        ):
            yield {"tensor": f"/buffers/{name}", "shape_a": _shape(one), "shape_b": _shape(other)}


def _difference_text(row: dict[str, Any]) -> str:
    if "max_abs" in row:
        return (
            f"{row['tensor']}: {row['elements']:,} elements differ, "
            f"by {row['max_abs']:.6g} at most; relative norm {row['relative']:.6g}"
        )
    name = printable(row["tensor"])
    if row["shape_a"] == row["shape_b"]:
        return f"{name}: other values"
    return f"{name}: {row['shape_a'] or 'nothing'} in A, {row['shape_b'] or 'nothing'} in B"


def _opened(path: str, step: int | None) -> Checkpoint:
    return Checkpoint.open(checkpoint_at(Path(path), step))


def _matching(checkpoint: Checkpoint, pattern: str | None) -> list[Tensor]:
    tensors = [tensor for tensor in checkpoint.table.tensors if _matches(tensor.name, pattern)]
    if not tensors and not any(_matches(name, pattern) for name in checkpoint.buffers):
        raise InputError(
            f"no tensor of {checkpoint.folder} matches {printable(pattern or '*')}; "
            "`hpczero ckpt show` lists them"
        )
    return tensors


def _matches(name: str, pattern: str | None) -> bool:
    """Match as a shell does; a text without *, ? and [ matches the names that contain it."""
    if pattern and any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    return (pattern or "") in name


def _slots(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return the slots of this name, of all names, or InputError with those that there are."""
    known = {slot.removeprefix("optimizer/"): slot for slot in checkpoint.slots}
    if name == "all":
        return list(known.values())
    if name not in known:
        shown = dict.fromkeys(re.sub(r"^replica_\d+/", "replica_K/", one) for one in known)
        there = join_words([*shown, "all"], "or")
        raise InputError(f"--slot {printable(name, 100)}: {checkpoint.folder} has {there}")
    return [known[name]]


def _summary(checkpoint: Checkpoint) -> list[str]:
    content = checkpoint.content
    state = content.state
    grid = ", ".join(f"{printable(axis)} {size}" for axis, size in content.grid.items())
    parameters = sum(tensor.size for tensor in checkpoint.table.tensors)
    writer = f"hpczero {printable(content.hpczero)}, format {content.format}"
    files = f"{len(content.shards)} shard files; slots {', '.join(checkpoint.slots)}"
    loop = checkpoint.said_by_loop()
    kept = [*loop.get("extra", ()), *loop.get("generators", ())]
    return [
        f"{printable(str(checkpoint.folder))}: step {state.step}, {state.updates} updates, "
        f"{parameters:,} parameters, {format_bytes(content.size)}",
        f"  saved {printable(content.created)} by {writer}",
        f"  {content.ranks} ranks ({grid}), {files}",
        f"  loss scale {state.loss_scale:g}, {state.good_steps} good steps",
        *([f"  saved by a loop of its own, with {printable(first_few(kept))}"] if kept else []),
    ]


def _facts(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> dict[str, Any]:
    content = checkpoint.content
    return {
        "path": str(checkpoint.folder),
        "format": content.format,
        "hpczero": content.hpczero,
        "created": content.created,
        "size": content.size,
        "state": content.state.model_dump(),
        "grid": content.grid,
        "ranks": content.ranks,
        "files": [
            {"file": shard.file, "size": shard.size, "ranks": [data.rank for data in shard.ranks]}
            for shard in content.shards
        ],
        "slots": list(checkpoint.slots),
        "tensors": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "dtype": "float32",
                "pieces": list(_pieces(checkpoint, tensor)),
            }
            for tensor in tensors
        ],
        "buffers": [
            {"name": name, "shape": values.shape, "dtype": str(values.dtype)}
            for name, values in checkpoint.buffers.items()
        ],
        "loop": checkpoint.said_by_loop(),
        "spec": content.spec,
    }


def _pieces(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[dict[str, Any]]:
    table = checkpoint.table
    for piece in table.pieces(table.number[tensor.name]):
        rank = int(table.rank[piece])
        box = table.box(piece)
        yield {
            "rank": rank,
            "file": checkpoint.shards.file_of(rank),
            "offset": int(table.offset[piece]),
            "start": [cut.start for cut in box],
            "stop": [cut.stop for cut in box],
        }


def _piece_line(piece: dict[str, Any]) -> str:
    ends = zip(piece["start"], piece["stop"], strict=True)
    box = ", ".join(f"{start}:{stop}" for start, stop in ends)
    offset = f"element {piece['offset']:>12,}"
    return f"      rank {piece['rank']:>5} {piece['file']} {offset}  [{box}]\n"


def _number(value: float | int | None) -> str:
    if value is None:
        return f"{'-':>10}"
    return f"{value:>10,}" if isinstance(value, int) else f"{value:>10.4g}"


def _print_as_json(rows: Sequence[dict[str, Any]]) -> None:
    """Print numbers that are not finite as text, since JSON has no word for them."""
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[key] = str(value)
    print(json.dumps(rows, indent=2))


def _shape(values: Any) -> list[int] | None:
    return None if values is None else list(values.shape)
