"""A `config.json`, whose every key is taken, is known to change nothing, or is refused (pure)."""

import json
from collections.abc import Mapping
from typing import Any

import pydantic

from hpczero.errors import InputError
from hpczero.spec.schema import Model
from hpczero.text import join_words, printable

_MOST = 16 << 20  # characters of a configuration
# What these say is not about what the model computes when it is evaluated, or is about other tasks.
_HARMLESS = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("_name_or_path", "auto_map", "tokenizer_class", "prefix", "use_cache", "n_ctx"),
        *("output_past", "initializer_factor", "dropout_rate"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("decoder_start_token_id", "is_decoder", "chunk_size_feed_forward"),
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj", "task_specific_params", "finetuning_task"),
        *("id2label", "label2id", "num_labels", "problem_type", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_scores", "cache_implementation"),
        *("gradient_checkpointing", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "reorder_and_upcast_attn"),
    )
)


class Config:
    """`source`: its name in messages."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._values = values
        self._taken: set[str] = set()

    @classmethod
    def parse(cls, text: str, source: str) -> "Config":
        if len(text) > _MOST:
            raise InputError(f"{source}: {len(text):,} characters are no configuration")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise InputError(f"{source}: a table was expected")
        return cls(values, source)

    def architecture(self) -> str:
        match self._values.get("architectures"):
            case [str(name)]:
                return name
        return str(self._values.get("architectures"))

    def take(self, name: str, default: Any = None) -> Any:
        self._taken.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return name in self._values

    @property
    def is_full(self) -> bool:
        return bool(self._values)

    def table(self, name: str) -> "Config":
        """Return what is below a key, each key of which has to be taken too."""
        values = self.take(name) or {}
        if not isinstance(values, dict):
            raise InputError(f"{self.source}: {name} is no table: {printable(str(values), 100)}")
        return Config(values, f"{self.source}: {name}")

    def demand(self, name: str, value: Any) -> None:
        found = self.take(name, value)
        if found != value:
            raise self.refusal(name, f"hpczero's models have {json.dumps(value)} there")

    def refuse_others(self) -> None:
        """Refuse what nobody took, unless it is known to change nothing, or says "none"."""
        others = [
            name
            for name, value in self._values.items()
            if name not in self._taken and name not in _HARMLESS and not _says_none(value)
        ]
        if others:
            more = f" (and {len(others) - 1} more such keys)" if len(others) > 1 else ""
            raise self.refusal(
                others[0],
                f"hpczero does not know what it changes in the model{more}; "
                "if that is nothing, take it out of the file",
            )

    def refusal(self, name: str, reason: str) -> InputError:
        said = printable(json.dumps(self._values.get(name)), 100)
        return InputError(f"{self.source}: {printable(name, 60)} = {said}: {reason}")

    def model_of(self, values: Mapping[str, Any]) -> Model:
        missing = [key for key, value in values.items() if value is None]
        if missing:
            raise InputError(f"{self.source} does not say {join_words(missing)} of the model")
        try:
            return Model.model_validate(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            found = printable(repr(first.get("input")), 60)
            raise InputError(
                f"{self.source}: model.{key} = {found} comes of it: {first['msg']}"
            ) from error


def _says_none(value: Any) -> bool:
    return value is None or value is False
