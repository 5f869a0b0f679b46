"""The table [model] of the spec: what the family is built from."""

from typing import Literal

from pydantic import StrictBool

from hpczero.spec.attention import Attention
from hpczero.spec.spans import FEWEST_SENTINELS, SpanLengths, lengths_within
from hpczero.spec.table import Factory, Table, key


class Model(Table):
    """The model to train."""

    family: Literal["gpt", "llama", "bert", "t5"] | Factory = key(
        "gpt",
        "identity",
        "gpt, llama, bert, t5, or a factory that takes this table and returns a torch.nn.Module",
    )
    layers: int = key(
        4,
        "identity",
        "transformer blocks, of t5 those of encoder and decoder together",
        ge=1,
        le=10_000,
    )
    hidden: int = key(256, "identity", "width of the residual stream", ge=1, le=10_000_000)
    heads: int = key(4, "identity", "attention heads", ge=1, le=1_000_000)
    head_dim: int = key(
        0, "identity", "width of a head; 0: hidden / heads, rounded up", ge=0, le=10_000_000
    )
    ffn: int = key(
        0,
        "identity",
        "width inside the feed-forward part; 0: 4 x hidden, of llama 8 / 3 x hidden, rounded up "
        "to a multiple of 256",
        ge=0,
        le=100_000_000,
    )
    vocab: int = key(
        257, "identity", "vocabulary size; the byte tokenizer has 257", ge=1, le=1_000_000_000
    )
    seq_len: int = key(
        128,
        "identity",
        "most tokens in a sequence, of t5 those of encoder and decoder together; gpt and bert "
        "learn so many positions",
        ge=1,
        le=100_000_000,
    )
    dropout: float = key(
        0.0, "identity", "dropout after the embedding, attention and feed-forward", ge=0, lt=1
    )
    tied_embeddings: StrictBool = key(True, "identity", "the head uses the embedding's weight")
    kernels: Literal["auto", "torch"] = key(
        "auto", "site", "hpczero's kernels where they are faster, or PyTorch's operations alone"
    )
    # of llama and its relatives
    kv_heads: int = key(
        0,
        "identity",
        "llama: heads of keys and values, a divisor of heads; 0: as many as heads",
        ge=0,
        le=1_000_000,
    )
    activation: Literal["silu", "gelu", "gelu_exact"] = key(
        "silu", "identity", "llama: gate of the feed-forward part (SwiGLU; GeGLU by tanh or exact)"
    )
    norm_eps: float = key(
        1e-5, "identity", "added to the variance, or the mean square, in norms", gt=0, le=1
    )
    norm_offset: StrictBool = key(False, "identity", "llama: norms multiply by 1 + weight (Gemma)")
    post_norms: StrictBool = key(
        False, "identity", "llama: norms also after attention and feed-forward (Gemma)"
    )
    qk_norm: StrictBool = key(
        False, "identity", "llama: norms over each head of queries and keys (Qwen 3, Gemma 3)"
    )
    qkv_bias: StrictBool = key(False, "identity", "llama: biases of query, key, value (Qwen 2)")
    output_bias: StrictBool = key(False, "identity", "llama: bias of attention's output")
    ffn_bias: StrictBool = key(False, "identity", "llama: biases of the feed-forward part")
    rope_base: float = key(
        1e4, "identity", "llama: base of the rotary positions (rope_theta)", gt=1, le=1e12
    )
    rope_fraction: float = key(
        1.0, "identity", "llama: share of a head that is rotated", gt=0, le=1
    )
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = key(
        "none",
        "identity",
        "llama: how positions are stretched beyond rope_original (Hugging Face: rope_type)",
    )
    rope_factor: float = key(
        1.0, "identity", "llama: by how much positions are stretched (factor)", ge=1, le=1e6
    )
    rope_original: int = key(
        0,
        "identity",
        "llama: tokens in a sequence before the stretching (llama3, yarn)",
        ge=0,
        le=100_000_000,
    )
    rope_low: float = key(
        1.0,
        "identity",
        "llama3: up to so many turns within rope_original all is stretched (low_freq_factor)",
        gt=0,
        le=1e6,
    )
    rope_high: float = key(
        4.0,
        "identity",
        "llama3: from so many turns on nothing is stretched (high_freq_factor)",
        gt=0,
        le=1e6,
    )
    rope_fast: float = key(
        32.0,
        "identity",
        "yarn: from so many turns on nothing is stretched (beta_fast)",
        gt=0,
        le=1e6,
    )
    rope_slow: float = key(
        1.0, "identity", "yarn: up to so many turns all is stretched (beta_slow)", gt=0, le=1e6
    )
    rope_attention: float = key(
        0.0,
        "identity",
        "yarn: factor of the rotated queries and keys; 0: 0.1 ln(rope_factor) + 1",
        ge=0,
        le=1e3,
    )
    rope_local_base: float = key(
        0.0,
        "identity",
        "llama: base in layers with a window, unstretched (Gemma 3); 0: as in all layers",
        ge=0,
        le=1e12,
    )
    window: int = key(
        0, "identity", "llama: keys that a query sees; 0: all before it", ge=0, le=100_000_000
    )
    window_pattern: int = key(
        0,
        "identity",
        "llama: every so many layers one has no window (2: Gemma 2, 6: Gemma 3); 0: none",
        ge=0,
        le=10_000,
    )
    query_scale: float = key(
        0.0,
        "identity",
        "llama: factor of attention's logits; 0: 1 / sqrt(head_dim)",
        ge=0,
        le=1e3,
    )
    attention_cap: float = key(
        0.0, "identity", "llama: soft cap of attention's logits; 0: none", ge=0, le=1e6
    )
    logit_cap: float = key(
        0.0, "identity", "llama: soft cap of the head's logits; 0: none", ge=0, le=1e6
    )
    embedding_scale: float = key(
        1.0, "identity", "llama: factor of the embedding (Gemma: sqrt(hidden))", gt=0, le=1e6
    )
    # of bert
    norm_order: Literal["post", "pre"] = key(
        "post",
        "identity",
        "bert: norms after each sum with the residual stream (as published), or before attention "
        "and feed-forward (as in Megatron-LM)",
    )
    masked_fraction: float = key(
        0.15, "identity", "bert, t5: share of the tokens to predict", gt=0, lt=1
    )
    sentences: Literal["none", "next", "order"] = key(
        "none",
        "identity",
        "bert: a sequence is one text, or two: does the second follow (BERT), or were they swapped "
        "(ALBERT)",
    )
    # of t5
    encoder_layers: int = key(
        0, "identity", "t5: blocks of the encoder; 0: half of layers", ge=0, le=10_000
    )
    feed_forward: Literal["gated-gelu", "gated-silu", "relu"] = key(
        "gated-gelu",
        "identity",
        "t5: gated (version 1.1), or relu (as first published)",
    )
    position_buckets: int = key(
        32, "identity", "t5: classes of distances between positions", ge=4, le=100_000
    )
    position_reach: int = key(
        128, "identity", "t5: distance from which all are in the last class", ge=2, le=100_000_000
    )
    span_length: float = key(
        3.0, "identity", "t5: mean number of tokens in a masked span", ge=1, le=1e6
    )
    attention: Attention = Attention()

    @property
    def masks(self) -> bool:
        """The model predicts masked tokens, and not the next one."""
        return self.family in ("bert", "t5")

    @property
    def encoder_blocks(self) -> int:
        """Blocks of the encoder; 0 where there are no two kinds of blocks."""
        return (self.encoder_layers or self.layers // 2) if self.family == "t5" else 0

    @property
    def decoder_blocks(self) -> int:
        """Blocks of the decoder; all of them where there are no two kinds."""
        return self.layers - self.encoder_blocks

    @property
    def special_tokens(self) -> int:
        """Ids of samples' special tokens after a vocabulary that has none of them."""
        if self.family == "t5":
            return 2 + max(FEWEST_SENTINELS, self.spans(self.seq_len).spans)
        return 3 if self.family == "bert" else 0

    def spans(self, seq_len: int) -> SpanLengths:
        """Return how many tokens of a sequence are text, and masked, in how many spans."""
        return lengths_within(seq_len, self.masked_fraction, self.span_length)

    def streams(self, seq_len: int) -> tuple[int, ...]:
        """Return the positions of a sequence that blocks work on: of encoder and decoder, or all.

        They lie one after the other.
        """
        if self.family != "t5":
            return (seq_len,)
        of_decoder = self.target_count(seq_len)
        return seq_len - of_decoder, of_decoder

    def text_len(self, seq_len: int) -> int:
        """Return the tokens of text that a sequence is made of: special ones are no text."""
        if self.family == "t5":
            return self.spans(seq_len).text
        if self.family == "bert":
            return seq_len - (2 if self.sentences == "none" else 3)
        return seq_len

    def target_count(self, seq_len: int) -> int:
        """Return the most targets of a sequence."""
        if self.family == "t5":
            return self.spans(seq_len).decoder
        if self.family == "bert":
            return max(1, round(self.masked_fraction * self.text_len(seq_len)))
        return seq_len


_NAMES = list(Model.model_fields)
# family -> keys that others leave at their default
KEYS_OF: dict[str, tuple[str, ...]] = {
    "gpt": (),
    "llama": tuple(
        name
        for name in _NAMES[_NAMES.index("kv_heads") : _NAMES.index("norm_order")]
        if name != "norm_eps"
    ),
    "bert": ("norm_order", "masked_fraction", "sentences"),
    "t5": (
        "masked_fraction",
        *_NAMES[_NAMES.index("encoder_layers") : _NAMES.index("attention")],
    ),
}
