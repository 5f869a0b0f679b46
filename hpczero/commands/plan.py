"""`hpczero plan`: the layouts that fit into a cluster's nodes, the fastest first."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpczero.batch import sites
from hpczero.commands import plan_picture, plan_report
from hpczero.errors import InputError, for_terminal
from hpczero.model.families import known, layers
from hpczero.model.shapes import Layer
from hpczero.planner import cluster
from hpczero.planner.allocation import Allocation
from hpczero.planner.bill import Bill
from hpczero.planner.layout_space import Space
from hpczero.planner.layouts import TABLES
from hpczero.planner.search import Found, Machine, Planned, Search
from hpczero.planner.trade import node_counts, pareto, why
from hpczero.safe_files import write_new
from hpczero.spec.keys import keys, no_such_key
from hpczero.spec.load import load, to_toml
from hpczero.spec.rules import contradictions, unavailable
from hpczero.spec.schema import Spec
from hpczero.text import join_words, parse_duration, printable, toml_repr

_MOST_RANKS = 1_000_000
_EXISTS = "{} exists already and is left as it is: name another file"
_KEYS = {f"{table}.{key}": key for key, table in TABLES.items()}


def plan(options: Namespace) -> int:
    _refuse_what_would_be_ignored(options)
    if options.explain:
        from hpczero.commands.explain import explain

        return explain(options)
    for name, value in (("SPEC, the job's file", options.spec), ("--nodes", options.nodes)):
        if not value:
            raise InputError(f"{name} is missing: hpczero plan SPEC --cluster C --nodes N")
    job = Job(options)
    if options.top < 1:
        raise InputError(f"--top {options.top}: at least one layout")
    if not known(job.spec.model):
        if options.json or options.write or options.svg or options.why:
            raise InputError(
                f"{job.spec.model.family} has to be built before its layers are known: there is "
                "no layout to write, to draw or to explain, and no --json"
            )
        nodes = [Allocation.of_nodes(count, job.ranks_per_node) for count in job.node_counts]
        print(for_terminal("\n".join(plan_report.of_unknown_model(job.spec, job.machine, nodes))))
        return 0
    if options.why:
        return _explain(job)
    searches = [job.search(count) for count in job.node_counts]
    found = [search.run() for search in searches]
    if options.json:
        print(json.dumps(_as_data(job, found), indent=2))
    else:
        print(for_terminal("\n".join(_in_lines(job, found))))
    best = [one.best for one in found if one.best]
    if not best:
        raise InputError(_nothing_fits(job, found))
    fastest = min(best, key=lambda one: one.time.seconds)
    if options.svg:
        _write_file(options, options.svg, _picture(job, found, fastest), "")
    if options.write:
        said = f": {plan_report.words(fastest.layout)}"
        _write_file(options, options.write, to_toml(job.written(fastest)), said)
    return 0


def _refuse_what_would_be_ignored(options: Namespace) -> None:
    """Refuse options that say nothing beside others, and files that are there (InputError)."""
    if options.explain and (options.spec or options.nodes or options.pin or options.overrides):
        raise InputError("--explain RUN takes the spec and the nodes of the run: leave others out")
    files = {f"--{name}": getattr(options, name) for name in ("svg", "write")}
    asked = {name: file for name, file in files.items() if file is not None}
    for name, file in asked.items():
        if options.explain or options.why:
            raise InputError(f"{name}: a plan without --why and --explain writes it")
        if not file or len(set(asked.values())) < len(asked):
            raise InputError(f"{name} {printable(file)}: name a file of its own")
        if Path(file).exists():
            raise InputError(_EXISTS.format(printable(file)))


@dataclass
class Job:
    """A job, and the cluster that it is planned for."""

    options: Namespace

    @property
    def cluster_name(self) -> str:
        """The name as a spec has it: the path of a file, where that was named."""
        name = self.options.cluster or self.as_given.batch.cluster
        if not name:
            raise InputError(
                "which cluster is it planned for? --cluster or batch.cluster names one of "
                f"{join_words(cluster.names())}, or a file *.toml"
            )
        return str(name)

    @cached_property
    def named(self) -> cluster.Named:
        return cluster.find(self.cluster_name)

    @cached_property
    def as_given(self) -> Spec:
        return load(self.options.spec, self.options.overrides).spec

    @cached_property
    def spec(self) -> Spec:
        """The spec as it is on the devices of the cluster."""
        given = self.as_given
        kind = self.named.cluster.device.kind
        if given.train.device not in ("auto", kind):
            raise InputError(
                f"train.device = {toml_repr(given.train.device)}, and the devices of "
                f"{self.named.name} are {'GPUs' if kind == 'cuda' else 'CPUs'}: "
                f'set it to "auto" or {toml_repr(kind)}'
            )
        spec = given.model_copy(update={"train": given.train.model_copy(update={"device": kind})})
        self.named.cluster.products(spec.train.precision)  # InputError if there is no rate
        for contradiction in contradictions(spec):
            raise InputError(f"{contradiction.text} (on the devices of {self.named.name})")
        if known(spec.model) and (missing := unavailable(spec)):
            raise InputError("; ".join(missing))
        return spec

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.named.cluster, sites.platform(self.spec, 0))

    @cached_property
    def layers(self) -> list[Layer]:
        return layers(self.spec.model)

    @cached_property
    def node_counts(self) -> list[int]:
        counts = node_counts(self.options.nodes, self.named.cluster.nodes)
        if counts[-1] * self.ranks_per_node > _MOST_RANKS:
            raise InputError(
                f"--nodes {counts[-1]:,} with {self.ranks_per_node:,} ranks on each are more than "
                f"{_MOST_RANKS:,} ranks"
            )
        return counts

    @cached_property
    def ranks_per_node(self) -> int:
        """The ranks of a node: as asked for, as in the spec, or one for each device."""
        asked = self.options.ranks_per_node
        if asked is not None and not 1 <= asked <= _MOST_RANKS:
            raise InputError(f"--ranks-per-node {asked}: from 1 to {_MOST_RANKS:,}")
        spec = self.spec
        devices = self.named.cluster.node.devices
        return asked or spec.comm.ranks_per_node or spec.batch.ranks_per_node or devices

    @cached_property
    def pinned(self) -> frozenset[str]:
        """The keys of layouts that keep the spec's value: those of --set and of --pin."""
        given = [text.partition("=")[0].strip() for text in self.options.overrides]
        for name in self.options.pin:
            if name not in _KEYS:
                about = (
                    f"--pin {name} is no key of a layout" if name in keys() else no_such_key(name)
                )
                raise InputError(f"{about}: a layout has {join_words(sorted(_KEYS))}")
        return frozenset(_KEYS[name] for name in (*given, *self.options.pin) if name in _KEYS)

    def search(self, nodes: int) -> Search:
        files = bool(self.named.cluster.node.nvme_gb)
        allocation = Allocation.of_nodes(nodes, self.ranks_per_node)
        self.named.cluster.need_links(allocation.most, allocation.count)
        if "offload" in self.pinned:
            self.named.cluster.need_files(self.spec.zero.folder)
        space = Space(self.spec, allocation, self.pinned, files)
        return Search(space, self.layers, self.machine, self.options.top)

    def bill(self, planned: Planned) -> Bill:
        walltime = parse_duration(self.spec.batch.walltime)
        steps, nodes = self.spec.train.steps, planned.nodes.count
        return Bill.of(steps, planned.time.seconds, nodes, walltime)

    def bests(self, found: list[Found]) -> list[tuple[Planned, Bill]]:
        """Return the fastest layout on each number of nodes, and what it costs."""
        return [(one.best, self.bill(one.best)) for one in found if one.best]

    def written(self, planned: Planned) -> Spec:
        """Return the spec as its user has it, with this layout on these nodes."""
        given = self.as_given
        gpus = self.named.cluster.node.devices if self.spec.train.device == "cuda" else 0
        batch = {
            "cluster": self.cluster_name,
            "nodes": planned.nodes.count,
            "ranks_per_node": planned.nodes.ranks_per_node,
            "gpus_per_node": gpus,
        }
        comm = given.comm
        if comm.ranks_per_node not in (0, planned.nodes.ranks_per_node):
            comm = comm.model_copy(update={"ranks_per_node": 0})
        train = given.train.model_copy(update={"micro_batch": planned.layout.micro_batch})
        return given.model_copy(
            update={
                "parallel": planned.spec.parallel,
                "zero": planned.spec.zero,
                "memory": planned.spec.memory,
                "train": train,
                "comm": comm,
                "batch": given.batch.model_copy(update=batch),
            }
        )


def _nothing_fits(job: Job, found: list[Found]) -> str:
    nodes = found[-1].nodes
    if not found[-1].counts.all:
        pinned = ", ".join(sorted(job.pinned)) or "nothing"
        return (
            f"no layout can exist on {plan_report.of_nodes(nodes)}: {pinned} is pinned; "
            "hpczero check --ranks says what contradicts what"
        )
    close = f", {len(found[-1].planned):,} are too close to call" if found[-1].planned else ""
    return (
        f"no layout fits surely into {plan_report.of_nodes(nodes)} of {job.named.name}{close}: "
        "more nodes, a smaller train.global_batch, or a smaller model"
    )


def _in_lines(job: Job, found: list[Found]) -> Iterator[str]:
    top = job.options.top
    yield from plan_report.heading(job.spec, job.named, found)
    if len(found) > 1:
        bests = job.bests(found)
        yield from plan_report.trade(bests, pareto(bests))
        found = [one for one in found if one.best][-1:]
    for one in found:
        rows = [(row, job.bill(row)) for row in one.rows(top)]
        yield from plan_report.table(rows)


def _as_data(job: Job, found: list[Found]) -> dict[str, Any]:
    bests = job.bests(found)
    front = {id(planned) for planned, _ in pareto(bests)}
    return {
        "spec": job.spec.name,
        "cluster": job.named.name,
        "file": job.named.file,
        "nodes": [
            {
                "nodes": one.nodes.count,
                "ranks": one.nodes.ranks,
                "counts": vars(one.counts),
                "on_the_front": bool(one.best) and id(one.best) in front,
                "layouts": [
                    plan_report.as_data(row, job.bill(row)) for row in one.rows(job.options.top)
                ],
            }
            for one in found
        ],
    }


def _explain(job: Job) -> int:
    """Print what the layout of --why loses against the best one, on the most nodes asked for."""
    settings = _settings(job.options.why)
    search = job.search(job.node_counts[-1])
    found = search.run()
    if not found.planned:
        raise InputError(_nothing_fits(job, [found]))
    difference = why(_named_layout(job, search, found, settings), found, search.room)
    if job.options.json:
        print(json.dumps(plan_report.difference_as_data(difference), indent=2))
    else:
        print(for_terminal("\n".join(plan_report.difference(difference))))
    return 0


def _settings(text: str) -> dict[str, str]:
    """Return section.key -> value of "tensor=4,stage=3"; none for a row, or for "spec"."""
    if text.isdecimal() or text == "spec":
        return {}
    names = {key: name for name, key in _KEYS.items()}
    settings = {}
    for part in text.split(";" if ";" in text else ","):
        key, equals, value = part.partition("=")
        name = names.get(key.strip(), key.strip())
        if not equals or name not in _KEYS:
            raise InputError(
                f"--why {printable(text, 80)}: a row of the table, spec, or keys as in "
                "tensor=4,stage=3 (with ; between them where a value has commas); a layout has "
                f"{join_words(sorted(names))}"
            )
        settings[name] = value
    return settings


def _named_layout(job: Job, search: Search, found: Found, settings: dict[str, str]) -> Planned:
    """Return the layout of --why: a row of the table, "spec", or the best one with other keys."""
    text = job.options.why
    if text.isdecimal():
        rows = found.rows(job.options.top)
        if len(text) > 9 or not 1 <= int(text) <= len(rows):
            raise InputError(f"--why {printable(text, 40)}: the table has rows 1 to {len(rows)}")
        return rows[int(text) - 1]
    spec = job.spec
    if settings:
        best = found.first
        values = {name: _as_set(getattr(best.layout, key)) for name, key in _KEYS.items()}
        changed = [f"{name}={value}" for name, value in (values | settings).items()]
        given = [*job.options.overrides, f"train.device={spec.train.device}", *changed]
        spec = load(job.options.spec, given).spec
    recompute = "none" if spec.memory.recompute == "auto" else spec.memory.recompute
    memory = spec.memory.model_copy(update={"recompute": recompute})
    return search.judge(spec.model_copy(update={"memory": memory}))


def _as_set(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _picture(job: Job, found: list[Found], fastest: Planned) -> str:
    if len(found) == 1:
        return plan_picture.step(fastest, job.named.name)
    bests = job.bests(found)
    return plan_picture.trade(bests, f"{job.spec.name} on {job.named.name}")


def _write_file(options: Namespace, name: str, text: str, of_what: str) -> None:
    """Write a new file and say so; with --json not among the data."""
    try:
        write_new(Path(name), text)
    except FileExistsError:
        raise InputError(_EXISTS.format(printable(name))) from None
    except OSError as error:
        raise InputError(f"{printable(name)} cannot be written: {error.strerror}") from None
    said = f"wrote {printable(name)}{of_what}"
    print(for_terminal(said), file=sys.stderr if options.json else sys.stdout)
