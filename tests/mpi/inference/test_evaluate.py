"""An evaluation gives, on any number of ranks, the figures that plain PyTorch gives one window at
a time.
"""

import json
from itertools import product
from math import exp, log
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hpczero.comm.group import Group
from hpczero.comm.world import World
from hpczero.data.dataset import FileSource
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.device import CPU
from hpczero.inference.evaluate import EvaluationSet, RankWork, evaluate
from hpczero.inference.load_model import load_model, open_checkpoint
from tests.support.covering import Case
from tests.support.inference import MODELS, SIZES, model_of, random_run
from tests.support.token_files import make

pytestmark = pytest.mark.mpi

SEQ_LEN = 21


def expected(run: Path, text: EvaluationSet, file: TokenFile) -> dict[str, float]:
    """The figures by plain PyTorch: the whole model on one document or window at a time."""
    with open_checkpoint(str(run), None) as checkpoint:
        module = load_model(checkpoint, torch.float32, CPU)
    loss = hits = weight = 0.0
    read = []
    for number in range(text.windows):
        batch = text.read(range(number, number + 1))
        *layers, head = module.layers()
        x = batch.tokens
        for layer in layers:
            x = layer(x, batch)
        logits = head.scores(x)[0]
        weights = torch.ones(SEQ_LEN) if batch.weights is None else batch.weights[0]
        of_targets = functional.cross_entropy(logits, batch.targets[0], reduction="none")
        loss += (of_targets * weights).sum().item()
        hits += ((logits.argmax(-1) == batch.targets[0]) * weights).sum().item()
        weight += weights.sum().item()
        read += batch.targets[0][weights > 0].tolist()
    size = sum(token != file.end_of_document for token in read)
    return {
        "loss": loss / weight,
        "perplexity": exp(loss / weight),
        "bits_per_byte": loss / log(2) / size,
        "accuracy": hits / weight,
        "tokens": weight,
        "bytes": size,
    }


def groups(world: World, tensor: int) -> tuple[Group, Group | None]:
    """The data group of this rank, and its tensor group if there is one."""
    first = world.rank // tensor * tensor
    data = world.group("data", range(world.rank % tensor, world.size, tensor))
    return data, world.group("tensor", range(first, first + tensor)) if tensor > 1 else None


def cases(ranks: int, everything: bool) -> list[Case]:
    most = min(ranks, SIZES["heads"])  # every tensor rank needs a head
    tensors = [size for size in range(1, most + 1) if ranks % size == 0]
    found = [
        {"model": model, "tensor": tensor, "documents": documents, "count": count}
        for model, (documents, count) in product(
            MODELS, [("packed", 0), ("masked", 31), ("padded", 0)]
        )
        for tensor in tensors
    ]
    return found if everything else found[:: max(1, len(found) // 6)]


@pytest.mark.cases(of=cases)
@pytest.mark.usual(3)
@pytest.mark.few(2)
def test_the_figures_are_those_of_each_window_alone(
    world: World, case: Case, shared_folder: str
) -> None:
    folder = Path(shared_folder)
    if world.rank == 0:
        lines = [json.dumps({"text": f"number {n} of " + "é" * (n % 23)}) for n in range(400)]
        (folder / "text.jsonl").write_text("\n".join(lines))
        make(folder / "text.jsonl", folder / "text.h5")
        random_run(folder, model_of(case["model"], vocab=257), folder / "text.h5")
    world.everyone.barrier()
    run, file = folder / "runs" / "random", open_token_file(folder / "text.h5")
    source = FileSource(file, SEQ_LEN, case["documents"])
    sizes = file.made_with().bytes_of_ids()
    text = EvaluationSet(source, "validation", SEQ_LEN, case["documents"], 1, case["count"],
                torch.from_numpy(sizes))  # fmt: skip
    data, tensor = groups(world, case["tensor"])
    with open_checkpoint(str(run), None) as checkpoint:
        module = load_model(checkpoint, torch.float32, world.device, tensor)
    done: list[int] = []
    figures = evaluate(module, text, RankWork(data, tensor, 4, world.device), done.append)
    facts = figures.facts(text)
    everyones = world.all_gather_objects([sum(done), facts])
    assert all(theirs == facts for _, theirs in everyones)
    assert sum(count for count, _ in everyones) == text.windows * case["tensor"]
    for name, value in expected(run, text, file).items():
        assert facts[name] == pytest.approx(value, rel=1e-5), name
    assert facts["windows"] == text.windows == (case["count"] or source.windows("validation"))
    assert facts["tokens_of_split"] == source.targets("validation")
    assert (facts["standard_error"] == 0) == (case["count"] == 0)
