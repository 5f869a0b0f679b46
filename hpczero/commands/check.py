"""The verbs `check` and `spec`; they run on login nodes, without torch and mpi4py."""

import json
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.errors import InputError
from hpczero.spec import site_profile, states_folder
from hpczero.spec.keys import flat, keys, no_such_key
from hpczero.spec.load import ROLES, Loaded, as_data, as_markdown, as_text, load
from hpczero.spec.rules import unavailable, without_effect
from hpczero.spec.schema import Spec
from hpczero.text import printable, toml_repr
from hpczero.track.needs import missing

if TYPE_CHECKING:
    from hpczero.planner.allocation import Allocation
    from hpczero.planner.needs import Hardware
    from hpczero.planner.outlook import Outlook
    from hpczero.planner.platform import Platform

_MOST_RANKS = 1_000_000


def check(options: Namespace) -> int:
    if options.explain and options.explain not in keys():
        raise InputError(no_such_key(options.explain))
    loaded = load(options.spec, options.overrides)
    if options.explain:
        if options.json:
            print(json.dumps(_explained(loaded, options.explain), indent=2))
        else:
            print(_explanation(loaded, options.explain))
        return 0
    from hpczero.data.supply import count_tokens

    spec = loaded.spec
    supply = count_tokens(spec)
    layout = lay_out(spec, options.ranks, options.ranks_per_node)
    notes = [*unavailable(spec), *without_effect(spec), *_layout_notes(spec, layout)]
    notes += [*_model_notes(spec), *site_profile.unusable()]
    notes += filter(None, [states_folder.warning(spec.zero, "here")])
    notes += missing(spec.track)
    if options.json:
        print(json.dumps(_as_data(loaded, layout, notes) | {"data": supply.facts()}, indent=2))
    else:
        print(_as_text(options.spec, loaded, layout, supply.in_lines(spec.data.source), notes))
    if layout and layout.refusal:
        raise InputError(layout.refusal)
    return 0


def reference(options: Namespace) -> int:
    if options.json:
        print(json.dumps(as_data(), indent=2))
    else:
        print(as_markdown() if options.markdown else as_text())
    return 0


@dataclass(frozen=True)
class Layout:
    """The job laid out over a number of ranks.

    Stages, bytes and memory are None for a model that must be built to be known.
    """

    grid: list[str]  # in lines for people
    ranks: int
    order: str  # of the axes
    axes: dict[str, int]
    data_ranks: int
    micro_batches: int  # in a step, on each data rank
    smallest: int  # sequences in the smallest and the largest micro-batch
    largest: int
    nodes: list[dict[str, Any]]  # the ranks of each, and their places in the grid
    stages: list[dict[str, Any]] | None  # the layers of each
    sent: dict[str, dict[str, Any]] | None  # axis -> operation -> bytes in a step
    exchanged: dict[str, Any] | None  # what replicas send in place of gradients' plain sums
    gathers: str  # form of weights that are gathered, if not the model's precision; else ""
    memory: dict[str, Any] | None  # `planner.forecast`
    time: "Outlook | None"  # None where the cluster is not known, too
    left_out: list[str]  # what the spec asks for and these ranks do not do
    recompute: str  # memory.recompute, decided if it is "auto"
    refusal: str  # why it does not fit the nodes, as far as they are known; empty: it does


def lay_out(spec: Spec, ranks: int | None, per_node: int | None) -> Layout | None:
    """Return the layout over --ranks; None without this option."""
    if spec.batch.cluster:
        from hpczero.planner.cluster import find

        find(spec.batch.cluster)  # InputError if there is none
    if ranks is None:
        if per_node is not None:
            raise InputError(f"--ranks-per-node {per_node} needs --ranks, the number of all ranks")
        return None
    from hpczero.planner.platform import as_run

    node, platform = _runs_on(spec)
    spec = as_run(spec, platform.device)
    if per_node is None:
        of_job = spec.batch.ranks_per_node or node.gpus if platform.on_gpus else 0
        per_node = spec.comm.ranks_per_node or of_job or ranks
    if not 1 <= ranks <= _MOST_RANKS or per_node < 1:
        raise InputError(
            f"--ranks {ranks} --ranks-per-node {per_node}: "
            f"from 1 to {_MOST_RANKS:,} ranks, at least 1 on a node"
        )
    from hpczero.planner.allocation import Allocation

    return _layout(spec, Allocation(ranks, per_node), node, platform)


def _layout(spec: Spec, on: "Allocation", node: "Hardware", platform: "Platform") -> Layout:
    from hpczero.comm.grid import Grid
    from hpczero.data.samples import micro_batch_sizes
    from hpczero.model.families import known, layers
    from hpczero.planner import forecast
    from hpczero.planner.outlook import outlook
    from hpczero.planner.volumes import resolved

    parallel = resolved(spec, on.node_of_rank)
    grid = Grid.build(parallel, on.node_of_rank)
    data_ranks = grid.size("data")
    micro_batches, smallest, largest = micro_batch_sizes(
        spec.train.global_batch, spec.train.micro_batch, data_ranks
    )
    stages = sent = memory = time = None
    refusal = ""
    if known(spec.model):
        model = layers(spec.model)
        job, refusal = forecast.Forecast(spec, grid, node, platform).as_it_fits(model)
        spec = job.spec
        stages = forecast.stages(spec, model)
        sent = forecast.sent(spec, model, grid)
        memory = job.memory(model)
        time = outlook(spec, model, on, platform)
    return Layout(
        grid=grid.describe(spec.zero.shard_ranks),
        ranks=on.ranks,
        order=parallel.order,
        axes=grid.size_by_axis(spec.zero.shard_ranks),
        data_ranks=data_ranks,
        micro_batches=micro_batches,
        smallest=smallest,
        largest=largest,
        nodes=forecast.nodes(grid),
        stages=stages,
        sent=sent,
        exchanged=forecast.exchanged(spec, grid),
        gathers=forecast.form_of_gathers(spec, grid),
        memory=memory,
        time=time,
        left_out=forecast.left_out(spec, grid),
        refusal=refusal,
        recompute=spec.memory.recompute,
    )


def _runs_on(spec: Spec) -> "tuple[Hardware, Platform]":
    """Return the hardware of the job's nodes, and the platform that it uses there."""
    from hpczero.batch import sites

    named = spec.batch.site != "auto"
    partition = sites.facts(spec.batch.site)[2] if named else sites.Partition()
    node = sites.hardware(spec.batch, partition)
    return node, sites.platform(spec, node.gpus)


def _layout_notes(spec: Spec, layout: Layout | None) -> list[str]:
    if not layout:
        return []
    batch = spec.train.global_batch
    notes = [*layout.left_out]
    if spec.memory.recompute == "auto":
        notes.append(f'memory.recompute = "auto" becomes "{layout.recompute}" here')
    notes += layout.time.warnings() if layout.time else []
    if batch >= layout.data_ranks:
        return notes
    idle = f"{layout.data_ranks - batch:,} of the {layout.data_ranks:,} data ranks"
    return [f"train.global_batch = {batch} leaves {idle} without a sequence", *notes]


def _model_notes(spec: Spec) -> list[str]:
    from hpczero.model.shapes import head_dim

    model = spec.model
    if _parameters(spec) is None:
        return [f"the memory that {model.family} needs is not known without building it"]
    if model.head_dim or model.hidden % model.heads == 0:
        return []
    width = head_dim(model)
    return [
        f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}: "
        f"each head is {width} wide, {width * model.heads:,} in all; "
        "a divisor of model.hidden, or model.head_dim, says otherwise"
    ]


def _parameters(spec: Spec) -> int | None:
    """Return the number of parameters; None if the model must be built to know it."""
    from hpczero.model.families import known, parameter_count

    return parameter_count(spec.model) if known(spec.model) else None


def _tokens_per_step(spec: Spec) -> int:
    return spec.train.global_batch * spec.seq_len


def _as_text(
    path: str, loaded: Loaded, layout: Layout | None, supply: list[str], notes: list[str]
) -> str:
    """Return the report; `supply`: the training data in words."""
    verdict = "does not fit its nodes" if layout and layout.refusal else "is a valid job"
    lines = [f"{printable(path)} {verdict}", *_job_in_lines(loaded.spec, supply)]
    if layout is None:
        lines += _without_ranks(loaded.spec)
    else:
        first, *others = layout.grid
        lines += [f"  ranks     {first}", *(f"          {line}" for line in others)]
        lines += [f"            {_micro_batches(layout)}", *_topology(layout)]
        lines += _memory(layout.memory)
        lines += _titled("time", list(layout.time.in_lines())) if layout.time else []
    changed = [
        (name, value) for name, value in flat(loaded.spec).items() if value != keys()[name].default
    ]
    if changed:
        lines.append("not the default:")
    for name, value in changed:
        lines.append(f"  {f'{name} = {toml_repr(value)}':<42}  {loaded.sources[name].text}")
    return "\n".join(lines + [f"note: {note}" for note in notes])


def _job_in_lines(spec: Spec, supply: list[str]) -> list[str]:
    model = spec.model
    train = spec.train
    parameters = _parameters(spec)
    count = "number of parameters not known without building it"
    per_parameter = ""
    tokens = train.steps * _tokens_per_step(spec)
    if parameters is not None:
        count = f"{parameters:,} parameters"
        few = tokens < 1000 * parameters
        ratio = f"{tokens / parameters:.3g}" if few else f"{tokens // parameters:,}"
        per_parameter = f", {ratio} for each parameter" if parameters else ""
    width = f" of {model.head_dim}" if model.head_dim else ""
    in_blocks, streams = _attention(spec), ""
    if len(model.streams(spec.seq_len)) > 1:
        of_encoder, of_decoder = model.streams(spec.seq_len)
        streams = f" of {of_encoder} + {of_decoder} tokens, encoder and decoder,"
    lengths = [f"{length:,} from step {step:,} on" for step, length in spec.schedule.seq_len]
    return [
        f"  run       {spec.name}, in the folder {toml_repr(spec.output)}, seed {spec.seed}",
        f"  model     {model.family}: {count}; layers {model.layers}, hidden {model.hidden}, "
        f"heads {model.heads}{width}, vocabulary {model.vocab}, sequence {model.seq_len}",
        *([f"  attention {in_blocks}"] if in_blocks else []),
        *_titled("data", supply),
        f"  a step    {train.global_batch} sequences{streams} = {_tokens_per_step(spec):,} tokens, "
        f"in {train.precision}",
        *([f"  lengths   of sequences: {', '.join(lengths)}; as many tokens"] if lengths else []),
        f"  training  {train.steps:,} steps = {tokens:,} tokens{per_parameter}",
        f"  learning  {spec.optimizer.name}, rate {spec.optimizer.lr}, {spec.schedule.name}, "
        f"{spec.schedule.warmup_steps} steps of warm-up",
    ]


def _attention(spec: Spec) -> str:
    """Return what attention in blocks leaves of the model's work; "" where all layers are dense."""
    from hpczero.model.attention_layouts import density_of_layers, rules_of
    from hpczero.model.families import family, known

    model, seq_len = spec.model, spec.seq_len
    rules = rules_of(model) if known(model) else []
    if not any(rules):
        return ""
    counts = Counter(rule.kind for rule in rules if rule)
    kinds = [f"{kind} in {count} of {model.layers} layers" for kind, count in counts.items()]
    pairs = density_of_layers(model, seq_len)
    dense = model.model_copy(update={"attention": type(model.attention)()})
    work, of_dense = (sum(family(one).operations(one, seq_len)) for one in (model, dense))
    return (
        f"{', '.join(kinds)}: {pairs:.1%} of dense attention's pairs; "
        f"{work:.3g} operations a sequence in place of {of_dense:.3g}"
    )


def _micro_batches(layout: Layout) -> str:
    sizes = f"{layout.smallest}"
    if layout.smallest != layout.largest:
        sizes += f" or {layout.largest}"
    plural = "micro-batch" if layout.micro_batches == 1 else "micro-batches"
    return (
        f"each of the {layout.data_ranks:,} data ranks takes {layout.micro_batches:,} {plural} "
        f"of {sizes} sequences in a step"
    )


def _without_ranks(spec: Spec) -> list[str]:
    """Describe the layout as far as it does not depend on the number of ranks."""
    from hpczero.model.families import known, layers
    from hpczero.planner.forecast import stages, stages_in_lines

    tensor = spec.parallel.tensor
    pipeline = spec.parallel.pipeline
    lines = []
    if tensor * pipeline > 1:
        product = f"{tensor * pipeline:,}: tensor({tensor}) x pipeline({pipeline})"
        lines.append(f"  ranks     a multiple of {product}")
    if pipeline > 1 and known(spec.model):
        lines += _titled("stages", stages_in_lines(stages(spec, layers(spec.model))))
    return lines


def _topology(layout: Layout) -> list[str]:
    from hpczero.planner.forecast import (
        exchanged_in_lines,
        nodes_in_lines,
        sent_in_lines,
        stages_in_lines,
    )

    lines = _titled("nodes", nodes_in_lines(layout.nodes, layout.axes))
    if layout.stages and len(layout.stages) > 1:
        lines += _titled("stages", stages_in_lines(layout.stages))
    if layout.sent:
        head = "in a step, by the rank that sends the most and by all ranks, "
        head += "inside nodes and between them"
        between = exchanged_in_lines(layout.exchanged)
        if layout.gathers:
            between.append(f"weights are gathered in {layout.gathers}")
        lines += _titled("sent", [head, *sent_in_lines(layout.sent), *between])
    return lines


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
        "layout": _layout_as_data(layout) if layout else None,
        "notes": notes,
    }


def _layout_as_data(layout: Layout) -> dict[str, Any]:
    return vars(layout) | {"time": layout.time.as_data() if layout.time else None}


def _explained(loaded: Loaded, name: str) -> dict[str, Any]:
    key = keys()[name]
    given = loaded.history[name]
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
    key = keys()[name]
    *older, newest = loaded.history[name]
    lines = [
        f"{name} = {toml_repr(flat(loaded.spec)[name])}",
        f"  meaning     {key.description}",
        f"  allowed     {key.allowed}",
        f"  default     {toml_repr(key.default)}",
        f"  role        {key.role}: {ROLES[key.role]}",
        f"  from        {newest.source.text}",
    ]
    for entry in reversed(older):
        lines.append(f"  instead of  {toml_repr(entry.value)}  ({entry.source.text})")
    return "\n".join(lines)
