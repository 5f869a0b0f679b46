"""The verbs about specs: check, init, spec. They run on login nodes: no torch, no mpi4py."""

import json
import re
import shlex
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero.errors import InputError
from hpczero.safe_files import write_new
from hpczero.spec import site_profile
from hpczero.spec.keys import flat, keys, no_such_key
from hpczero.spec.load import Loaded, load
from hpczero.spec.reference import ROLES, as_data, as_markdown, as_text, to_start_from
from hpczero.spec.rules import unavailable, without_effect
from hpczero.spec.schema import Spec
from hpczero.text import printable, shown

if TYPE_CHECKING:
    from hpczero.planner.memory import Hardware, Platform

_MOST_RANKS = 1_000_000


def check(options: Namespace) -> int:
    if options.explain and options.explain not in keys():
        raise InputError(no_such_key(options.explain))
    loaded = load(options.spec, options.overrides)
    if options.explain:
        print(
            json.dumps(_explained(loaded, options.explain), indent=2)
            if options.json
            else _explanation(loaded, options.explain)
        )
        return 0
    from hpczero.data.supply import look

    supply, layout = look(loaded.spec), _lay_out(loaded.spec, options.ranks, options.ranks_per_node)
    notes = (
        unavailable(loaded.spec)
        + without_effect(loaded.spec)
        + _of_layout(loaded.spec, layout)
        + _unknown(loaded.spec)
    )
    notes += site_profile.left_out()
    if options.json:
        print(json.dumps(_as_data(loaded, layout, notes) | {"data": supply.facts()}, indent=2))
    else:
        print(_as_text(options.spec, loaded, layout, supply.in_words(), notes))
    if layout and layout.refusal:
        raise InputError(layout.refusal)
    return 0


def init(options: Namespace) -> int:
    path = Path(options.path)
    try:
        write_new(path, to_start_from(_run_name(path.stem)))
    except FileExistsError:
        raise InputError(
            f"{printable(options.path)} exists already and is left as it is: name another file"
        ) from None
    except OSError as error:
        raise InputError(f"{printable(options.path)} cannot be written: {error.strerror}") from None
    name = printable(shlex.quote(options.path))
    print(
        f"wrote {name}; edit it, then\n  hpczero check {name}             what the job is\n  mpirun -n 2 hpczero run {name}   train it"
    )
    return 0


def _run_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:100] or "run"


def reference(options: Namespace) -> int:
    print(
        json.dumps(as_data(), indent=2)
        if options.json
        else as_markdown()
        if options.markdown
        else as_text()
    )
    return 0


@dataclass(frozen=True)
class Layout:
    """What a number of ranks makes of the job. Of a model that is not known without building it there are no stages, bytes and memory."""

    grid: list[str]  # in lines for people
    ranks: int
    order: str  # of the axes, decided
    axes: dict[str, int]
    data_ranks: int
    micro_batches: int  # in a step, on each data rank
    smallest: int  # sequences in the smallest and the largest micro-batch
    largest: int
    nodes: list[dict[str, Any]]  # the ranks of each, and where they are in the grid
    stages: list[dict[str, Any]] | None  # the layers of each
    sent: dict[str, dict[str, Any]] | None  # axis -> operation -> bytes in a step
    memory: dict[str, Any] | None  # `planner.forecast`
    sharing_left_out: (
        str  # why the ranks of a node keep no states together where they otherwise would
    )
    refusal: str  # why it does not fit into what is known of the nodes; empty: it does


def _lay_out(spec: Spec, ranks: int | None, per_node: int | None) -> Layout | None:
    if ranks is None:
        if per_node is not None:
            raise InputError(
                f"--ranks-per-node {per_node} lays out the ranks of --ranks: say how many there are"
            )
        return None
    from hpczero.planner.memory import as_run

    node, platform = _runs_on(spec)
    spec = as_run(spec, platform.device)
    if per_node is None:
        of_job = spec.batch.ranks_per_node or node.gpus if platform.on_gpus else 0
        per_node = spec.comm.ranks_per_node or of_job or ranks
    if not 1 <= ranks <= _MOST_RANKS or per_node < 1:
        raise InputError(
            f"--ranks {ranks} --ranks-per-node {per_node}: from 1 to {_MOST_RANKS:,} ranks, at least 1 on a node"
        )
    from hpczero.comm.grid import Grid
    from hpczero.data.sampler import micro_batch_sizes
    from hpczero.model.families import known, layers
    from hpczero.planner import forecast
    from hpczero.planner import forecast as topology
    from hpczero.planner.volumes import resolved

    node_of_rank = [rank // per_node for rank in range(ranks)]
    parallel = resolved(spec, node_of_rank)
    grid = Grid.build(parallel, node_of_rank)
    data_ranks = grid.size("data")
    sizes = micro_batch_sizes(spec.train.global_batch, spec.train.micro_batch, data_ranks)
    stages = sent = memory = None
    refusal = ""
    if known(spec.model):
        model, job = layers(spec.model), forecast.Forecast(spec, grid, node, platform)
        stages, sent = topology.stages(spec, model), topology.sent(spec, model, grid)
        memory, refusal = job.memory(model), job.refusal(model)
    axes, left_out = (
        dict(zip(grid.axes, grid.sizes, strict=True)),
        topology.sharing_left_out(spec.zero, grid),
    )
    placed = topology.nodes(grid)
    return Layout(
        grid.describe(),
        ranks,
        parallel.order,
        axes,
        data_ranks,
        *sizes,
        placed,
        stages,
        sent,
        memory,
        left_out,
        refusal,
    )


def _runs_on(spec: Spec) -> "tuple[Hardware, Platform]":
    """Return what is known of the job's nodes, and what it runs on there."""
    from hpczero.batch import sites

    named = spec.batch.site != "auto"
    partition = sites.facts(spec.batch.site)[2] if named else sites.Partition()
    node = sites.hardware(spec.batch, partition)
    return node, sites.platform(spec, node.gpus)


def _of_layout(spec: Spec, layout: Layout | None) -> list[str]:
    if not layout:
        return []
    batch, idle = spec.train.global_batch, ""
    if batch < layout.data_ranks:
        idle = f"train.global_batch = {batch} leaves {layout.data_ranks - batch:,} of the {layout.data_ranks:,} data ranks without a sequence"
    return list(filter(None, (idle, layout.sharing_left_out)))


def _unknown(spec: Spec) -> list[str]:
    known = _parameters(spec) is not None
    return (
        _uneven_heads(spec)
        if known
        else [f"the memory that {spec.model.family} needs is not known without building it"]
    )


def _uneven_heads(spec: Spec) -> list[str]:
    from hpczero.model.shapes import head_dim

    model = spec.model
    if model.head_dim or model.hidden % model.heads == 0:
        return []
    wide, inner = head_dim(model), head_dim(model) * model.heads
    what = f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}"
    return [
        f"{what}: each head is {wide} wide, {inner:,} in all; a divisor of model.hidden, or model.head_dim, says otherwise"
    ]


def _parameters(spec: Spec) -> int | None:
    """None: not known without building the model."""
    from hpczero.model.families import known, parameter_count

    return parameter_count(spec.model) if known(spec.model) else None


def _tokens_per_step(spec: Spec) -> int:
    return spec.train.global_batch * spec.model.seq_len


def _as_text(
    path: str, loaded: Loaded, layout: Layout | None, supply: str, notes: list[str]
) -> str:
    """`supply`: what data.source has."""
    spec = loaded.spec
    model, train, schedule, parameters, per_step = (
        spec.model,
        spec.train,
        spec.schedule,
        _parameters(spec),
        _tokens_per_step(spec),
    )
    tokens = train.steps * per_step
    width = f" of {model.head_dim}" if model.head_dim else ""
    lines = [
        f"{printable(path)} {'does not fit its nodes' if layout and layout.refusal else 'is a valid job'}",
        f"  run       {spec.name}, in the folder {shown(spec.output)}, seed {spec.seed}",
        f"  model     {model.family}: {_count(parameters)}; layers {model.layers}, hidden {model.hidden}, heads {model.heads}{width},"
        f" vocabulary {model.vocab}, sequence {model.seq_len}",
        f"  data      {shown(spec.data.source)}: {supply}",
        f"  a step    {train.global_batch} sequences = {per_step:,} tokens, in {train.precision}",
        f"  training  {train.steps:,} steps = {tokens:,} tokens"
        + (f", {_ratio(tokens, parameters)} for each parameter" if parameters else ""),
        f"  learning  {spec.optimizer.name}, rate {spec.optimizer.lr}, {schedule.name}, {schedule.warmup_steps} steps of warm-up",
    ]
    lines += _without_ranks(spec) if layout is None else []
    if layout:
        first, *others = layout.grid
        lines += [
            f"  ranks     {first}",
            *(f"          {line}" for line in others),
            f"            {_dealt_out(layout)}",
        ]
        lines += _topology(layout) + _memory(layout.memory)
    changed = [(name, value) for name, value in flat(spec).items() if value != keys()[name].default]
    if changed:
        lines.append("not the default:")
        lines += [
            f"  {f'{name} = {shown(value)}':<42}  {loaded.sources[name].text}"
            for name, value in changed
        ]
    return "\n".join(lines + [f"note: {note}" for note in notes])


def _count(parameters: int | None) -> str:
    return (
        "number of parameters not known without building it"
        if parameters is None
        else f"{parameters:,} parameters"
    )


def _ratio(tokens: int, parameters: int) -> str:
    return (
        f"{tokens / parameters:.3g}" if tokens < 1000 * parameters else f"{tokens // parameters:,}"
    )


def _dealt_out(layout: Layout) -> str:
    each = (
        f"{layout.smallest}"
        if layout.smallest == layout.largest
        else f"{layout.smallest} or {layout.largest}"
    )
    plural = "micro-batch" if layout.micro_batches == 1 else "micro-batches"
    return f"each of the {layout.data_ranks:,} data ranks takes {layout.micro_batches:,} {plural} of {each} sequences in a step"


def _without_ranks(spec: Spec) -> list[str]:
    """What can be said of the layout while nobody knows how many ranks there are."""
    from hpczero.model.families import known, layers
    from hpczero.planner.forecast import stages, stages_in_lines

    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    lines = (
        [
            f"  ranks     a multiple of {tensor * pipeline:,}: tensor({tensor}) x pipeline({pipeline})"
        ]
        if tensor * pipeline > 1
        else []
    )
    if pipeline > 1 and known(spec.model):
        lines += _titled("stages", stages_in_lines(stages(spec, layers(spec.model))))
    return lines


def _topology(layout: Layout) -> list[str]:
    from hpczero.planner.forecast import nodes_in_lines, sent_in_lines, stages_in_lines

    found = {"nodes": nodes_in_lines(layout.nodes, layout.axes)}
    if layout.stages and len(layout.stages) > 1:
        found["stages"] = stages_in_lines(layout.stages)
    if layout.sent:
        found["sent"] = [
            "in a step, by the rank that sends the most and by all ranks, inside nodes and between them",
            *sent_in_lines(layout.sent),
        ]
    return [line for title, lines in found.items() for line in _titled(title, lines)]


def _memory(memory: dict[str, Any] | None) -> list[str]:
    from hpczero.planner.forecast import in_lines

    return _titled("memory", in_lines(memory)) if memory else []


def _titled(title: str, lines: list[str]) -> list[str]:
    return [f"  {'' if number else title:<10}{line}" for number, line in enumerate(lines)]


def _as_data(loaded: Loaded, layout: Layout | None, notes: list[str]) -> dict[str, Any]:
    spec = loaded.spec
    return {
        "name": spec.name,
        "parameters": _parameters(spec),
        "tokens_per_step": _tokens_per_step(spec),
        "tokens": spec.train.steps * _tokens_per_step(spec),
        "spec": spec.model_dump(),
        "sources": {
            name: source.text for name, source in loaded.sources.items() if source.text != "default"
        },
        "layout": vars(layout) if layout else None,
        "notes": notes,
    }


def _explained(loaded: Loaded, name: str) -> dict[str, Any]:
    key, given = keys()[name], loaded.history[name]
    return {
        "key": name,
        "value": flat(loaded.spec)[name],
        "source": given[-1].source.text,
        "instead_of": [
            {"value": older.value, "source": older.source.text} for older in reversed(given[:-1])
        ],
        "default": key.default,
        "allowed": key.allowed,
        "role": key.role,
        "description": key.description,
    }


def _explanation(loaded: Loaded, name: str) -> str:
    key, given = keys()[name], loaded.history[name]
    lines = [
        f"{name} = {shown(flat(loaded.spec)[name])}",
        f"  meaning     {key.description}",
        f"  allowed     {key.allowed}",
        f"  default     {shown(key.default)}",
        f"  role        {key.role}: {ROLES[key.role]}",
        f"  from        {given[-1].source.text}",
    ]
    return "\n".join(
        lines
        + [
            f"  instead of  {shown(older.value)}  ({older.source.text})"
            for older in reversed(given[:-1])
        ]
    )
