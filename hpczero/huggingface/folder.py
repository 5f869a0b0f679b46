"""A model's folder as Hugging Face has them: its configuration and weights, read and written."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from hpczero.checkpoint.import_safetensors import SourceTensor, tensors_of
from hpczero.checkpoint.safetensors import INDEX_NAME, WHOLE_NAME, SafetensorsFile
from hpczero.checkpoint.views import View
from hpczero.data.tokenizer import Tokenizer
from hpczero.errors import InputError
from hpczero.huggingface.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture_for,
    architecture_of,
    differing,
)
from hpczero.huggingface.config import Config
from hpczero.huggingface.tensor_names import NAMES, views
from hpczero.huggingface.tokenizer_files import as_json, tokenizer_files
from hpczero.safe_files import read_small, remove, written_durably
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Model, Spec
from hpczero.text import join_words, printable, toml_repr

CONFIG, _GENERATION = "config.json", "generation_config.json"
_MOST = 64 << 20  # bytes of a file of JSON
_SHOWN = 6
_HEAD = "lm_head.weight"
_EMBEDDING_OF_T5 = "shared.weight"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass
class Folder:
    """A folder that is read: its architecture and model, and what of its weights nobody needs."""

    path: Path
    config: Config
    architecture: Architecture
    model: Model
    unused: list[str] = field(default_factory=list)
    has_embedding_as_head: bool = False

    @classmethod
    def read(cls, path: Path) -> "Folder":
        source = path / CONFIG
        if not source.exists():
            raise InputError(
                f"{printable(str(path))} has no {CONFIG}: --hf takes a model's folder as Hugging "
                "Face has them"
            )
        config = Config.parse(read_text(source), printable(str(source)))
        architecture = architecture_of(config)
        model = architecture.to_model(config)
        if problems := contradictions(Spec(model=model)):
            raise InputError(f"{printable(str(source))}: {problems[0].text}")
        return cls(path, config, architecture, model)

    def views(self) -> list[View]:
        return views(self.architecture, self.model)

    def tensors(self, stack: ExitStack) -> dict[str, SourceTensor]:
        """Open the weights' files; return their tensors by the names of the architecture."""
        files = [stack.enter_context(SafetensorsFile(path)) for path in self._files()]
        found = tensors_of(files)
        wanted = {view.name for view in self.views()}
        names = NAMES[self.architecture.weights]
        if not any(name.startswith(names.outer) for name in found):  # of a model without its head
            found = {name if name == _HEAD else names.outer + name: t for name, t in found.items()}
        for old, new in names.older.items():
            renamed = {_with_ending(name, old, new): tensor for name, tensor in found.items()}
            if len(renamed) < len(found):
                raise InputError(
                    f"{printable(str(self.path))} has weights both as {old} and as {new}: take out "
                    "those that are not the model's"
                )
            found = renamed
        is_headless = _HEAD in wanted and _HEAD not in found and _EMBEDDING_OF_T5 in found
        self.has_embedding_as_head = is_headless and self._ties_unscaled_head()
        if self.has_embedding_as_head:
            found[_HEAD] = found[_EMBEDDING_OF_T5]
        unused = [
            name
            for name in found
            if name not in wanted and (name.endswith(names.unused) or name == _HEAD)
        ]
        self.unused += unused
        return {name: tensor for name, tensor in found.items() if name not in unused}

    def _ties_unscaled_head(self) -> bool:
        """Return True for a T5 whose head is its embedding, and has logits without a scale.

        Version 5 of transformers makes those of version 1.1 so; hpczero trains the two apart.
        """
        is_tied = self.config.take("tie_word_embeddings", default=True)
        return self.model.family == "t5" and is_tied and not self.model.tied_embeddings

    def _files(self) -> list[Path]:
        """Return the files that the index names, or the one that there is without an index."""
        index = self.path / INDEX_NAME
        if not index.exists():
            if (self.path / WHOLE_NAME).exists():
                return [self.path / WHOLE_NAME]
            raise InputError(
                f"{printable(str(self.path))} has neither {WHOLE_NAME} nor {INDEX_NAME}: "
                "weights in other formats (*.bin, *.gguf) have to be converted first"
            )
        try:
            names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
            plain = all(name == os.path.basename(name) and name not in ("", "..") for name in names)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"{printable(str(index))} is no index of weights") from error
        if not plain:
            raise InputError(f"{printable(str(index))} names files outside its folder")
        return [self.path / name for name in names]

    def refuse_another(self, spec_model: Model) -> None:
        """Raise InputError unless the spec's model computes what the folder's does."""
        keys = differing(spec_model, self.model)
        if keys:
            shown = [
                f"model.{key} = {toml_repr(attrgetter(key)(self.model))} "
                f"(the spec has {toml_repr(attrgetter(key)(spec_model))})"
                for key in keys[:_SHOWN]
            ]
            shown += [f"{len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
            raise InputError(
                f"{self.config.source} is another model than the spec's: {join_words(shown)}; "
                f"`hpczero init --from-hf {printable(str(self.path))}` writes a spec that fits"
            )


def _with_ending(name: str, old: str, new: str) -> str:
    return name.removesuffix(old) + new if name.endswith(old) else name


def read_text(path: Path) -> str:
    return read_small(path, _MOST).decode(errors="replace")


@dataclass(frozen=True)
class NewFolder:
    """A folder that a checkpoint's weights are exported to, with what belongs to them."""

    architecture: Architecture
    model: Model
    dtype: str  # of the weights: fp32, bf16 or fp16
    tokenizer: Tokenizer | None
    special_ids: Sequence[int]  # of the family's `SPECIAL_TOKENS`; none: not known

    @classmethod
    def of(
        cls,
        model: Model,
        wanted: str | None,
        dtype: str,
        tokenizer: Tokenizer | None,
        special_ids: Sequence[int] = (),
    ) -> Self:
        """InputError: no architecture, or not the one that is wanted, is the model."""
        if wanted and wanted not in ARCHITECTURES:
            raise InputError(
                f"--architecture {printable(wanted, 60)}: hpczero has "
                f"{join_words(list(ARCHITECTURES))}"
            )
        return cls(architecture_for(model, wanted), model, dtype, tokenizer, special_ids)

    def views(self) -> list[View]:
        return views(self.architecture, self.model)

    @contextmanager
    def written(self, folder: Path) -> Iterator[list[Path]]:
        """Write all but the weights, which are written inside the context; yield the paths.

        Files of the same content may be there already, from an export that was killed; others are
        refused. Files that are new are removed if the weights cannot be written.
        """
        contents = {folder / name: content for name, content in self._content().items()}
        new = [path for path in contents if not os.path.lexists(path)]
        for path, content in contents.items():
            if path not in new and (not path.is_file() or path.read_bytes() != content):
                name = printable(str(path))
                raise InputError(f"{name} exists already and is left as it is: name another folder")
        try:
            for path in new:
                with written_durably(path) as file:
                    file.write(contents[path])
            yield list(contents)
        except BaseException:
            for path in new:
                remove(path)
            raise

    def _content(self) -> dict[str, bytes]:
        config: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config |= self.architecture.to_config(self.model) | self._ids_of_decoder()
        config |= {"torch_dtype": _DTYPES[self.dtype]}
        if self.tokenizer is None:
            return {CONFIG: as_json(config)}
        end = {"eos_token_id": self.tokenizer.end_of_document}
        files = tokenizer_files(self.tokenizer, self.model)
        if self.model.masks:  # it writes no text
            return files | {CONFIG: as_json(config)}
        return files | {CONFIG: as_json(config | end), _GENERATION: as_json(end)}

    def _ids_of_decoder(self) -> dict[str, Any]:
        """Return the ids with which T5's decoder begins and ends, where they are known."""
        if self.model.family != "t5" or not self.special_ids:
            return {}
        begin, end, _ = self.special_ids
        names = "decoder_start_token_id", "pad_token_id", "eos_token_id"
        return dict(zip(names, (begin, begin, end), strict=True))
