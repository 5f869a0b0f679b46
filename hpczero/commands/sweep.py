"""`hpczero check`: a spec, or each run of a sweep in a row of a table."""

import json
from argparse import Namespace
from typing import Any

from hpczero.commands import check as of_spec
from hpczero.data.supply import count_tokens
from hpczero.errors import InputError
from hpczero.spec.load import Loaded, LoadedSweep, load_sweep
from hpczero.spec.rules import unavailable, without_effect
from hpczero.text import first_few, format_count, format_table, printable, toml_repr


def check(options: Namespace) -> int:
    sweep = None if options.explain else load_sweep(options.spec, options.overrides)
    if sweep is None:
        return of_spec.check(options)
    refusals: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for run, loaded in sweep.runs:
        refusal, of_run = _checked(loaded, options)
        if refusal:
            refusals.setdefault(refusal, []).append(run.name)
        for note in of_run:
            notes.setdefault(note, []).append(run.name)
    lines = _of_runs(notes, len(sweep.runs))
    if options.json:
        print(json.dumps(_as_data(sweep, refusals, lines), indent=2))
    else:
        _print(options.spec, sweep, refusals, lines)
    if refusals:
        raise InputError("\n  ".join(["not every run fits:", *_of_runs(refusals, 0)]))
    return 0


def _checked(loaded: Loaded, options: Namespace) -> tuple[str, list[str]]:
    """Return why the run would be refused, "" if it would not, and the notes on it."""
    spec = loaded.spec
    try:
        count_tokens(spec)
        layout = of_spec.lay_out(spec, options.ranks, options.ranks_per_node)
    except InputError as error:
        return str(error), []
    notes = [*unavailable(spec), *without_effect(spec), *(layout.left_out if layout else [])]
    return layout.refusal if layout else "", notes


def _of_runs(texts: dict[str, list[str]], of_all: int) -> list[str]:
    """Return each text, behind the runs that it is about unless these are all."""
    return [
        text if len(names) == of_all else f"{first_few(names)}: {text}"
        for text, names in texts.items()
    ]


def _print(path: str, sweep: LoadedSweep, refusals: dict[str, list[str]], notes: list[str]) -> None:
    refused = {name for names in refusals.values() for name in names}
    count = format_count(len(sweep.runs), "run")
    print(f"{printable(path)} is a sweep of {count}, in the folder {toml_repr(sweep.output)}")
    rows = []
    for run, _ in sweep.runs:
        settings = ", ".join(f"{key} = {toml_repr(value)}" for key, value in run.differs.items())
        rows.append([str(run.number), run.name, settings, "no" if run.name in refused else "yes"])
    print(format_table(["number", "name", "what differs", "valid"], rows))
    for note in notes:
        print(f"note: {note}")


def _as_data(
    sweep: LoadedSweep, refusals: dict[str, list[str]], notes: list[str]
) -> dict[str, Any]:
    refused = {name: text for text, names in refusals.items() for name in names}
    runs = [
        {
            "number": run.number,
            "name": run.name,
            "differs": run.differs,
            "refusal": refused.get(run.name, ""),
        }
        for run, _ in sweep.runs
    ]
    return {"sweep": sweep.name, "output": sweep.output, "runs": runs, "notes": notes}
