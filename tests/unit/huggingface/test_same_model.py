"""An imported model is the model of `transformers`: logits, loss and gradients; what is exported
again is its weights to the bit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpczero import cli
from hpczero.checkpoint.load import Checkpoint
from hpczero.huggingface.folder import Folder
from hpczero.model import build, families
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Model
from tests.support import hugging_face
from tests.support.hugging_face import MODELS


@pytest.fixture(scope="module", params=MODELS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of transformers, its folder, and the folder of the run that begins with it."""
    theirs = hugging_face.random_model(request.param)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder, max_shard_size="60KB")
    assert imported(folder) == 0
    return theirs, Folder.read(folder), folder / "adopted"


def imported(folder: Path) -> int:
    """Import a folder's weights into a run below it; return the exit code."""
    spec = str(folder / "spec.toml")
    assert cli.main(["init", "--from-hf", str(folder), spec]) == 0
    command = ["ckpt", "import", "--hf", str(folder), "--spec", spec]
    return cli.main([*command, "-o", str(folder / "adopted")])


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    (path,) = (run_folder / "checkpoints").glob("step*")
    with Checkpoint.open(path) as checkpoint:
        names = [tensor.name for tensor in checkpoint.table.tensors]
        return {name: checkpoint[f"/model/{name}"].torch() for name in names}


def built(model: Model, tensors: dict[str, torch.Tensor]) -> Any:
    module = build.on_meta(model)
    assert {p.name for layer in families.layers(model) for p in layer.parameters} == set(tensors)
    build.install_parameters(module, {n: torch.nn.Parameter(t) for n, t in tensors.items()})
    return module.eval()


def logits_of(module: Any, batch: MicroBatch) -> torch.Tensor:
    seen = []
    module.head.loss.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module(batch).backward()
    return seen[0].detach()


@pytest.mark.few(12)
def test_logits_loss_and_gradients_are_theirs(run: Any) -> None:
    theirs, read, folder = run
    module = built(read.model, weights(folder))
    batch = hugging_face.batch_of(theirs)
    targets = batch.targets.numel()
    loss, expected = hugging_face.outcome(theirs, batch)
    loss.backward()
    assert abs(module(batch).item() / targets - loss.item()) < 1e-5
    logits = logits_of(module, batch)
    assert (logits - expected).abs().max() < 1e-5
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for view in read.views():
        parts = [
            module.get_parameter(part.parameter).grad.flatten()[part.start : part.stop] / targets
            for part in view.parts
        ]
        flat = torch.cat(parts)
        ours = flat.view(view.shape[::-1]).t() if view.transposed else flat.view(view.shape)
        if view.name.endswith("self.key.bias"):  # it changes no softmax: rounding alone
            assert max(ours.norm(), gradients[view.name].norm()) < 1e-6
            continue
        distance = (ours - gradients[view.name]).norm() / gradients[view.name].norm()
        assert distance < 1e-4, view.name


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.few(20)
def test_what_is_exported_is_their_model_to_the_bit(
    run: Any, several: bool, tmp_path: Path
) -> None:
    theirs, read, folder = run
    out = tmp_path / "out"
    command = ["ckpt", "export", str(folder), str(out), "--hf"]
    command += ["--architecture", read.architecture.name]
    assert cli.main([*command, *(["--shard-size", "70KB"] if several else [])]) == 0
    assert len(list(out.glob("*.safetensors"))) > several
    exported = hugging_face.loaded(out)
    assert type(exported) is type(theirs)
    state = exported.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in theirs.state_dict().items())
    batch = hugging_face.batch_of(theirs)
    with torch.no_grad():
        found, expected = (hugging_face.outcome(model, batch)[1] for model in (exported, theirs))
    assert torch.equal(found, expected)
    spec, again = str(folder / "spec.toml"), tmp_path / "again"
    assert cli.main(["ckpt", "import", "--hf", str(out), "--spec", spec, "-o", str(again)]) == 0
    before, after = weights(folder), weights(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.few(6)
def test_a_folder_has_the_weights_of_one_export(run: Any, tmp_path: Path) -> None:
    """In one file or in several; readers do not agree on which of the two counts."""
    _, read, folder = run
    for first, then in (([], ["--shard-size", "70KB"]), (["--shard-size", "70KB"], [])):
        out = tmp_path / ("several" if first else "one")
        command = ["ckpt", "export", str(folder), str(out), "--hf"]
        command += ["--architecture", read.architecture.name]
        assert cli.main([*command, *first]) == 0
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert cli.main([*command, *then]) == 2
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.few(8)
def test_an_export_that_fails_leaves_nothing_and_one_that_was_killed_goes_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, read, folder = run
    out = tmp_path / "out"
    command = ["ckpt", "export", str(folder), str(out), "--hf"]
    command += ["--architecture", read.architecture.name]

    def full(*_: Any) -> list[Path]:
        raise OSError(28, "No space left on device", str(out / "model.safetensors"))

    with monkeypatch.context() as patched:
        patched.setattr("hpczero.checkpoint.export_safetensors.Export.to_file", full)
        assert cli.main(command) == 1
    assert not list(out.iterdir())
    assert cli.main(command) == 0
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "model.safetensors").unlink()  # as if killed after the configuration
    assert cli.main(command) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


@pytest.mark.parametrize("name", ["T5 1.0", "T5 1.1"])
def test_a_t5_of_older_versions_is_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file has the embedding three or four times, and a bias of no use."""
    theirs = hugging_face.random_model(name)
    new, old = tmp_path / "new", tmp_path / "old"
    theirs.save_pretrained(new)
    assert imported(new) == 0
    old.mkdir()
    config = json.loads((new / "config.json").read_text())
    is_tied = config.pop("scale_decoder_outputs")
    for key in ("is_gated_act", "dense_act_fn", "num_decoder_layers"):
        del config[key]
    config |= {"tie_word_embeddings": is_tied, "output_past": True, "n_positions": 512}
    (old / "config.json").write_text(json.dumps(config))
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors = {name: value.clone() for name, value in theirs.state_dict().items()}
    tensors[unused] = torch.ones(12, 6, dtype=torch.float32)
    save_file(tensors, old / "model.safetensors")
    capsys.readouterr()
    assert imported(old) == 0
    assert unused in capsys.readouterr().out
    found, expected = weights(old / "adopted"), weights(new / "adopted")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_an_unscaled_head_of_t5_begins_as_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 5 of transformers ties it when it makes a model of version 1.1."""
    theirs = hugging_face.random_model("T5 1.1")
    theirs.lm_head.weight = theirs.shared.weight
    theirs.save_pretrained(tmp_path)
    assert imported(tmp_path) == 0
    assert "WARN the head begins as the embedding" in capsys.readouterr().out
    found = weights(tmp_path / "adopted")
    assert torch.equal(found["head.logits.weight"], found["embedding.lookup.tokens"])
    batch = hugging_face.batch_of(theirs)
    module = built(Folder.read(tmp_path).model, found)
    _, expected = hugging_face.outcome(theirs, batch)
    assert (logits_of(module, batch) - expected).abs().max() < 1e-5
    # older versions do not tie it, and the file lacks it
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["ckpt", "import", "--hf", str(tmp_path), "--spec", str(tmp_path / "spec.toml")]
    assert cli.main([*command, "-o", str(tmp_path / "other")]) == 2
    assert "lm_head.weight" in capsys.readouterr().err
