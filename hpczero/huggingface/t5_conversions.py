"""Keys of T5's `config.json` that no key of [model] copies, read and written (pure)."""

from bisect import bisect_right
from typing import Any

from hpczero.huggingface.config import Config
from hpczero.huggingface.conversions import Values
from hpczero.spec.schema import Model
from hpczero.spec.spans import lengths_of

_MOST = 10_000_000  # positions of an encoder


class _Stacks:
    """Blocks of the encoder and of the decoder: as many, if only the first are said."""

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        encoders = self._count(config, "num_layers", defaults["num_layers"])
        decoders = self._count(config, "num_decoder_layers", encoders)
        return {"encoder_layers": encoders, "layers": encoders + decoders}

    def _count(self, config: Config, name: str, default: int) -> int:
        count = config.take(name, default)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise config.refusal(name, "it must be a number of blocks")
        return count

    def write(self, model: Model) -> dict[str, Any]:
        return {"num_layers": model.encoder_blocks, "num_decoder_layers": model.decoder_blocks}


_FEED_FORWARDS = {  # is it gated, by which function
    (True, "gelu_new"): "gated-gelu",
    (True, "gelu_pytorch_tanh"): "gated-gelu",
    (True, "silu"): "gated-silu",
    (True, "swish"): "gated-silu",
    (False, "relu"): "relu",
}


class _FeedForward:
    """Newer versions also write what `feed_forward_proj` says in two keys, and believe these."""

    _KEYS = ("dense_act_fn", "is_gated_act", "feed_forward_proj")

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        said = config.take("feed_forward_proj", "relu")
        gate, _, function = str(said).rpartition("-")
        function = config.take("dense_act_fn", "gelu_new" if said == "gated-gelu" else function)
        is_gated = config.take("is_gated_act", gate == "gated")
        for known, ours in _FEED_FORWARDS.items():  # a stranger's values may not be hashable
            if known == (is_gated, function) and gate in ("", "gated"):
                return {"feed_forward": ours}
        name = next(key for key in self._KEYS if config.take(key) is not None)
        raise config.refusal(name, "no model of hpczero has this feed-forward part")

    def write(self, model: Model) -> dict[str, Any]:
        return {"feed_forward_proj": model.feed_forward}


class _Head:
    """A head that shares the embedding scales its logits, and no other one.

    Version 5 of transformers says just that in a key of its own, and that all heads are tied: one
    that is not tied has its weight in the file.
    """

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        is_tied = self._flag(config, "tie_word_embeddings", default=True)
        scales = self._flag(config, "scale_decoder_outputs", default=is_tied)
        if scales and not is_tied:
            raise config.refusal(
                "scale_decoder_outputs",
                "hpczero's models scale the logits of a tied head alone (tie_word_embeddings)",
            )
        return {"tied_embeddings": scales}

    def _flag(self, config: Config, name: str, default: bool) -> bool:
        found = config.take(name, default)
        if not isinstance(found, bool):
            raise config.refusal(name, "it must be true or false")
        return found

    def write(self, model: Model) -> dict[str, Any]:
        return {"tie_word_embeddings": model.tied_embeddings}


class _Sample:
    """Tokens of a sample, which limit no T5, and the ids it generates and is fine-tuned with."""

    def read(self, config: Config, found: Values, defaults: Values) -> dict[str, Any]:
        """Take the longest sample with so many tokens of the encoder.

        It has no more spans than the vocabulary has sentinels for, beside two special tokens and
        one of text.
        """
        most = config.take("n_positions", defaults["n_positions"])
        if not isinstance(most, int) or isinstance(most, bool) or not 0 < most <= _MOST:
            raise config.refusal("n_positions", f"it must be a number from 1 to {_MOST:,}")
        vocabulary = found["vocab"]
        sentinels = vocabulary - 3 if isinstance(vocabulary, int) else most
        default = Model()
        kind = default.masked_fraction, default.span_length
        texts = range(2, 2 * most + 2)
        short = bisect_right(texts, most, key=lambda text: lengths_of(text, *kind).encoder)
        few = bisect_right(texts, sentinels, key=lambda text: lengths_of(text, *kind).spans)
        return {"seq_len": lengths_of(texts[max(0, min(short, few) - 1)], *kind).sample}

    def write(self, model: Model) -> dict[str, Any]:
        """Return T5's own ids, which are the run's if it has others (`NewFolder`)."""
        return {
            "n_positions": model.streams(model.seq_len)[0],
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


STACKS = _Stacks()
FEED_FORWARD = _FeedForward()
HEAD = _Head()
SAMPLE = _Sample()
