"""`hpczero ckpt ls`, `show`, `stats`, `diff`: they look, and change nothing. They need neither MPI nor torch."""

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from hpczero.checkpoint.directory import (
    COMPLETE,
    Listed,
    checkpoint_at,
    folders_of_checkpoints,
    listed,
)
from hpczero.checkpoint.load import Checkpoint, Difference, Statistics
from hpczero.checkpoint.piece_table import Tensor
from hpczero.checkpoint.shard_file import SLOTS, WIDTH, bar
from hpczero.errors import InputError
from hpczero.text import in_bytes, printable

_SLOTS = {
    slot.rpartition("/")[2]: number for number, slot in enumerate(SLOTS)
}  # as --slot names them


def ls(options: Namespace) -> int:
    folders = [found for path in options.paths for found in folders_of_checkpoints(Path(path))]
    found = [one for checkpoints in folders for one in listed(checkpoints)]
    if options.json:
        print(json.dumps([one.as_data() for one in found], indent=2))
        return 0
    run = None
    for one in found:
        if one.run != run:
            run = one.run
            print(printable(str(run)))
        print(_line(one))
    if not found:
        print("no checkpoints in " + ", ".join(printable(str(path)) for path in options.paths))
    return 0


def _line(one: Listed) -> str:
    grid = " x ".join(
        f"{printable(axis, 20)} {size}" for axis, size in (one.grid or {}).items() if size > 1
    ) or ("1 rank" if one.ranks == 1 else "")
    problem = "" if one.state == COMPLETE or not one.problem else f"  ({printable(one.problem)})"
    return f"  {printable(one.path.name):24} {one.state:10} {in_bytes(one.size):>8}  {printable(one.created or ''):25}  {grid}{problem}".rstrip()


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
            held = f"{len({piece['rank'] for piece in pieces})} ranks, {len({piece['file'] for piece in pieces})} files"
            print(
                f"  {tensor.name:{width}}  float32 {list(tensor.shape)!s:20} {tensor.size:>15,}  {held}"
            )
            for piece in pieces if options.pieces else ():
                print(
                    f"      rank {piece['rank']:>5} {piece['file']} element {piece['offset']:>12,}  {_box_text(piece)}"
                )
        for name, values in checkpoint.buffers.items():
            if _matches(name, options.pattern):
                print(
                    f"  {printable(name):{width}}  {values.dtype} {list(values.shape)!s:20} {values.size:>15,}  buffer"
                )
    return 0


def stats(options: Namespace) -> int:
    with _opened(options.checkpoint, options.step) as checkpoint:
        tensors, slots = _matching(checkpoint, options.pattern), _slots(options.slot)
        rows = []
        with bar("reading", sum(tensor.size for tensor in tensors) * WIDTH * len(slots)) as advance:
            for slot in slots:
                for tensor in tensors:
                    found = Statistics()
                    for values in checkpoint[f"/{SLOTS[slot]}/{tensor.name}"].stretches():
                        found.add(values)
                        advance(values.nbytes)
                    rows.append(
                        {
                            "slot": SLOTS[slot],
                            "name": tensor.name,
                            "elements": tensor.size,
                            **found.as_data(),
                        }
                    )
    if options.json:
        _print_as_json(rows)
        return 0
    columns = ["norm", "mean", "std", "min", "max", "nan", "inf"]
    width = max((len(_name(row, slots)) for row in rows), default=0)
    print(f"{'':{width}}" + "".join(f"  {column:>10}" for column in columns))
    for row in rows:
        print(
            f"{_name(row, slots):{width}}"
            + "".join(f"  {_number(row[column])}" for column in columns)
        )
    return 0


def diff(options: Namespace) -> int:
    if not options.tolerance >= 0:
        raise InputError(f"--tolerance {options.tolerance}: it must be 0 or more")
    with _opened(options.a, None) as a, _opened(options.b, None) as b:
        rows = list(_differences(a, b, _slots(options.slot), options.tolerance))
        if options.json:
            _print_as_json(rows)
        else:
            for row in rows:
                print(_difference_text(row))
            print(
                f"{len(rows)} tensors differ" if rows else f"equal: {len(a.table.tensors)} tensors"
            )
    return 1 if rows else 0


def _differences(
    a: Checkpoint, b: Checkpoint, slots: Sequence[int], tolerance: float
) -> Iterator[dict[str, Any]]:
    here, there = ({tensor.name: tensor for tensor in one.table.tensors} for one in (a, b))
    both = [
        tensor
        for name, tensor in here.items()
        if name in there and tensor.shape == there[name].shape
    ]
    for name in [*here, *(name for name in there if name not in here)]:
        shapes = [list(found[name].shape) if name in found else None for found in (here, there)]
        if shapes[0] != shapes[1]:
            yield {"tensor": f"/{SLOTS[0]}/{name}", "shape_a": shapes[0], "shape_b": shapes[1]}
    with bar("comparing", sum(tensor.size for tensor in both) * WIDTH * len(slots)) as advance:
        for name in [f"/{SLOTS[slot]}/{tensor.name}" for slot in slots for tensor in both]:
            found = Difference()
            for values, reference in zip(a[name].stretches(), b[name].stretches(), strict=True):
                found.add(values, reference)
                advance(values.nbytes)
            if found.relative > tolerance:
                yield {
                    "tensor": name,
                    "max_abs": found.largest,
                    "relative": found.relative,
                    "elements": found.differing,
                }
    for name in sorted(a.buffers.keys() | b.buffers.keys()):
        mine, other = a.buffers.get(name), b.buffers.get(name)
        if (
            mine is None
            or other is None
            or mine.dtype != other.dtype
            or mine.shape != other.shape
            or not np.array_equal(mine, other)
        ):
            yield {"tensor": f"/buffers/{name}", "shape_a": _shape(mine), "shape_b": _shape(other)}


def _difference_text(row: dict[str, Any]) -> str:
    if "max_abs" in row:
        return f"{row['tensor']}: {row['elements']:,} elements differ, by {row['max_abs']:.6g} at most; relative norm {row['relative']:.6g}"
    if row["shape_a"] == row["shape_b"]:
        return f"{printable(row['tensor'])}: other values"
    return f"{printable(row['tensor'])}: {row['shape_a'] or 'nothing'} in A, {row['shape_b'] or 'nothing'} in B"


def _opened(path: str, step: int | None) -> Checkpoint:
    return Checkpoint.open(checkpoint_at(Path(path), step))


def _matching(checkpoint: Checkpoint, pattern: str | None) -> list[Tensor]:
    found = [tensor for tensor in checkpoint.table.tensors if _matches(tensor.name, pattern)]
    if not found and not any(_matches(name, pattern) for name in checkpoint.buffers):
        raise InputError(
            f"no tensor of {checkpoint.folder} matches {printable(pattern or '*')}; `hpczero ckpt show` lists them"
        )
    return found


def _matches(name: str, pattern: str | None) -> bool:
    """As a shell's pattern; a text without *, ? and [ matches the names that contain it."""
    if not pattern:
        return True
    return fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name


def _slots(name: str) -> list[int]:
    return list(_SLOTS.values()) if name == "all" else [_SLOTS[name]]


def _summary(checkpoint: Checkpoint) -> list[str]:
    content, state = checkpoint.content, checkpoint.content.state
    grid = ", ".join(f"{printable(axis)} {size}" for axis, size in content.grid.items())
    parameters = sum(tensor.size for tensor in checkpoint.table.tensors)
    return [
        f"{printable(str(checkpoint.folder))}: step {state.step}, {state.updates} updates, {parameters:,} parameters, {in_bytes(content.size)}",
        f"  saved {printable(content.created)} by hpczero {printable(content.hpczero)}, format {content.format}",
        f"  {content.ranks} ranks ({grid}), {len(content.shards)} shard files; slots {', '.join(SLOTS)}",
        f"  loss scale {state.loss_scale:g}, {state.good_steps} good steps",
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
        "slots": list(SLOTS),
        "tensors": [
            {
                "name": t.name,
                "shape": t.shape,
                "dtype": "float32",
                "pieces": list(_pieces(checkpoint, t)),
            }
            for t in tensors
        ],
        "buffers": [
            {"name": name, "shape": values.shape, "dtype": str(values.dtype)}
            for name, values in checkpoint.buffers.items()
        ],
        "spec": content.spec,
    }


def _pieces(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[dict[str, Any]]:
    table = checkpoint.table
    for piece in table.pieces(table.number[tensor.name]):
        rank, box = int(table.rank[piece]), table.box(piece)
        yield {
            "rank": rank, "file": checkpoint.shards.file_of(rank), "offset": int(table.offset[piece]),
            "start": [cut.start for cut in box], "stop": [cut.stop for cut in box],
        }  # fmt: skip


def _box_text(piece: dict[str, Any]) -> str:
    return (
        "["
        + ", ".join(
            f"{start}:{stop}" for start, stop in zip(piece["start"], piece["stop"], strict=True)
        )
        + "]"
    )


def _name(row: dict[str, Any], slots: Sequence[int]) -> str:
    return f"{row['slot']}/{row['name']}" if len(slots) > 1 else str(row["name"])


def _number(value: float | int | None) -> str:
    return (
        f"{'-':>10}"
        if value is None
        else f"{value:>10,}"
        if isinstance(value, int)
        else f"{value:>10.4g}"
    )


def _print_as_json(rows: Sequence[dict[str, Any]]) -> None:
    """What is not finite, which JSON cannot say, as text."""
    said = [
        {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        for row in rows
    ]
    print(json.dumps(said, indent=2))


def _shape(values: Any) -> list[int] | None:
    return None if values is None else list(values.shape)
