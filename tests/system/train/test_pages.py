"""The commands that the pages show work as they stand, one after the other, on little text."""

import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT, hpczero, launch, mpirun

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALLER = {
    "steps = 1200": 'steps = 4\nprecision = "fp32"',  # many processors have no bf16 products
    "layers = 7": "layers = 2",
    "warmup_steps = 60": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to carry out the commands in: some modules of the library in `text`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    (tmp_path / "text").mkdir()
    for name in ("argparse.py", "ast.py", "bdb.py", "calendar.py", "cgi.py", "code.py"):
        if (library / name).exists():
            shutil.copy(library / name, tmp_path / "text")
    (tmp_path / "prompts.txt").write_text("import os\nclass Page\n")
    return tmp_path


def text_of(page: str) -> str:
    return (CHECKOUT / "docs" / page).read_text()


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of hpczero in a text."""
    for language, block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["hpczero"]:
                yield hpczero(*words[1:])
            elif words[:1] == ["mpirun"] and words[3] == "hpczero":
                yield [*mpirun(int(words[2])), *hpczero(*words[4:])]


def carry_out(text: str, folder: Path) -> str:
    """Carry out all commands in a text; return what they print."""
    said = ""
    for command in commands(text):
        done = launch(command, 300, folder)
        assert done.code == 0, (command, done)
        said += done.out
    return said


@pytest.mark.slow
def test_a_llama_of_your_own(folder: Path) -> None:
    page = text_of("your-llama.md")
    (spec,) = (block for language, block in BLOCK.findall(page) if language == "toml")
    for there, instead in SMALLER.items():
        assert there in spec
        spec = spec.replace(there, instead)
    (folder / "llama.toml").write_text(spec)
    said = carry_out(page, folder)
    assert "bits per byte" in said
    assert "    def read(self" in said
    assert {path.name for path in (folder / "for-others").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def model_of_transformers(folder: Path) -> None:
    """Save a tiny Llama with a tokenizer of its own, as somebody else would."""
    import transformers

    command = ["data", "tokenizer", "train", "-o", "tokenizer.json", "--vocabulary", "300", "text"]
    assert launch(hpczero(*command), 60, folder).code == 0
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "tokenizer.json").rename(folder / "model" / "tokenizer.json")


@pytest.mark.slow
def test_from_and_to_hugging_face(folder: Path) -> None:
    import transformers

    model_of_transformers(folder)
    carry_out(text_of("hugging-face.md"), folder)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(folder / "tuned")
    begun = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert type(tuned) is type(begun)
    moved = [
        (one - other).abs().max().item()
        for one, other in zip(tuned.parameters(), begun.parameters(), strict=True)
    ]
    assert all(0 < distance < 0.1 for distance in moved)  # a hundred steps at 3e-4
    read = transformers.AutoTokenizer.from_pretrained(folder / "tuned")
    assert read.decode(read.encode("def main():")) == "def main():"


@pytest.mark.slow
def test_your_own_tokenizer(folder: Path) -> None:
    section = text_of("data.md").partition("## Your own tokenizer")[2].partition("\n## ")[0]
    said = carry_out(section, folder)
    assert "8,192 ids" in said or "WARN the text has no more pairs" in said
    assert said.count("<|endoftext|>") == 1
