"""A letter that was last seen 2,048 tokens ago: attention in blocks learns to recall it, a window
of 256 does not.
"""

import json
import random
from pathlib import Path

import pytest

from tests.support.launch import hpczero, launch, mpirun

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TIMES, BACK = 63, 2048  # the letter comes so often, then nothing of it for so many tokens
PROMPTS = 100
SPEC = """
name = "recall"
[model]
layers = 2
hidden = 64
heads = 2
seq_len = 2112
{attention}
[data]
source = "text.h5"
documents = "padded"
[train]
steps = 400
global_batch = 8
micro_batch = 8
precision = "fp32"
[optimizer]
lr = 1e-2
[schedule]
warmup_steps = 20
"""
IN_BLOCKS = """
[model.attention]
kind = "{kind}"
block = 64
window = 4
"""


def document(draws: random.Random) -> tuple[str, str]:
    """Return a text that ends with a question, and the answer: the letter in it."""
    letter = draws.choice(LETTERS)
    return letter * TIMES + "." * (BACK - 1) + "?", letter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draws = tmp_path_factory.mktemp("recall"), random.Random(1)
    texts = ["".join(document(draws)) for _ in range(2000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines)
    built = launch(hpczero("data", "build", "-o", "text.h5", "text.jsonl"), 120, folder)
    assert built.code == 0, built.err
    prompts, answers = zip(*(document(draws) for _ in range(PROMPTS)), strict=True)
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    (folder / "answers.txt").write_text("\n".join(answers) + "\n")
    return folder


def recalled(folder: Path, name: str, attention: str) -> float:
    """Return the share of questions that a model answers, trained with this attention."""
    (folder / f"{name}.toml").write_text(SPEC.format(attention=attention))
    run = hpczero("run", f"{name}.toml", "--set", f"output={name}")
    trained = launch([*mpirun(1), *run], 900, folder)
    assert trained.code == 0, trained.err
    words = ("--file", "prompts.txt", "--tokens", "1", "--temperature", "0", "--json")
    said = launch(hpczero("sample", f"{name}/recall", *words), 300, folder)
    assert said.code == 0, said.err
    answers = (folder / "answers.txt").read_text().split()
    found = [answer["text"] for answer in json.loads(said.out)]
    return sum(map(str.__eq__, found, answers)) / len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "longformer"])
def test_blocks_recall_what_is_far_back(folder: Path, kind: str) -> None:
    assert recalled(folder, kind, IN_BLOCKS.format(kind=kind)) > 0.95


@pytest.mark.slow
def test_a_window_of_256_does_not(folder: Path) -> None:
    assert recalled(folder, "local", IN_BLOCKS.format(kind="local")) < 3 / len(LETTERS)
