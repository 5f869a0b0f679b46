"""Tables of what a run was told, what happened to it, and what it ran on (pure)."""

from collections.abc import Mapping
from typing import Any

from hpczero.report.contents import Block, Preformatted, Section, Table, Text
from hpczero.runs.columns import TIME, number
from hpczero.runs.record import Run
from hpczero.spec.keys import flat, keys
from hpczero.spec.schema import Spec
from hpczero.text import format_count, log_value, printable, toml_repr

_MOST_EVENTS = 300  # the first and the last ones
_LONGEST = 400
_MOST_HOSTS = 200


def spec_section(run: Run) -> Section:
    """Return the settings that differ from the defaults, and all of them behind a line."""
    if not run.spec:
        return Section("What was it told?", [Text("spec.toml cannot be read.", warns=True)])
    described = {name: key.description for name, key in keys().items()}
    defaults = flat(Spec())
    rows = [
        [key, toml_repr(value), toml_repr(defaults[key]), described.get(key, "")]
        for key, value in run.changed_settings.items()
    ]
    head = ["key", "value", "default", "meaning"]
    everything = "\n".join(f"{key} = {toml_repr(value)}" for key, value in run.settings.items())
    what = format_count(len(rows), "setting")
    return Section(
        "What was it told?",
        [
            Table(f"{what} of {len(run.settings)} that differ from the defaults", head, rows),
            Preformatted("All settings", everything),
        ],
    )


def events_section(run: Run) -> Section:
    rows = [_event(event) for event in run.events]
    blocks: list[Block] = [Text(problem, warns=True) for problem in run.problems]
    if len(rows) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        left_out = format_count(len(rows) - _MOST_EVENTS, "event")
        rows = [*rows[:half], ["", "…", f"{left_out} left out"], *rows[-half:]]
    warnings = [row for row in rows if row[1] == "WARN"]
    if warnings:
        blocks.append(Table("Warnings", ["time (UTC)", "event", "what"], warnings[-50:]))
    caption = format_count(len(run.events), "event")
    blocks.append(Table(caption, ["time (UTC)", "event", "what"], rows, folded=True))
    return Section("Events", blocks)


def environment_section(run: Run) -> Section:
    """Return the packages, hosts and devices of the last job."""
    if not run.jobs:
        return Section("Where did it run?", [Text("The run has left no start.")])
    job = run.jobs[-1]
    packages = job.start.get("packages")
    facts = [[str(name), str(one)] for name, one in _mapping(packages).items()]
    facts.append(["MPI", str(job.start.get("mpi", "?"))])
    git = job.start.get("git")
    facts += [[f"git {name}", str(one)] for name, one in _mapping(git).items()]
    facts += [["threads of a rank", str(job.layout.get("threads_per_rank", "?"))]]
    facts += [
        [f"kernel of {name}", str(one)]
        for name, one in _mapping(run.summary.get("kernels")).items()
    ]
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank in job.ranks:
        place = str(rank.get("host", "?")), str(rank.get("device", "?"))
        found = number(rank.get("rank"))
        hosts.setdefault(place, []).append(int(found) if found == found else -1)
    rows = [
        [host, device, str(len(ranks)), f"{min(ranks)} to {max(ranks)}"]
        for (host, device), ranks in list(hosts.items())[:_MOST_HOSTS]
    ]
    return Section(
        "Where did it run?",
        [
            Table("Hosts of the last job", ["host", "device", "ranks", "numbers"], rows),
            Table("Software", ["name", "value"], facts, folded=True),
        ],
    )


def _event(event: Mapping[str, Any]) -> list[str]:
    when = printable(str(event.get(TIME, "?"))[:19].replace("T", " "))
    rest = {key: one for key, one in event.items() if key not in (TIME, "event", "packages", "git")}
    if isinstance(rest.get("ranks"), list):
        rest["ranks"] = len(rest["ranks"])
    words = " ".join(f"{key}={log_value(one)}" for key, one in rest.items())
    return [when, printable(str(event.get("event", "?")), 40), printable(words, _LONGEST)]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
