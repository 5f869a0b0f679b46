"""Keys that belong to other families, and masked samples that cannot be."""

import re

import pytest

from hpczero.errors import InputError
from hpczero.model.families import FAMILIES
from hpczero.spec.load import load
from hpczero.spec.model import KEYS_OF
from tests.support.specs import Write

BERT = '[model]\nfamily = "bert"\nvocab = 260\n'
T5 = '[model]\nfamily = "t5"\nvocab = 500\n'
CASES = {
    "a key of llama": (
        '[model]\nfamily = "bert"\nvocab = 260\nwindow = 5\n',
        'model.window = 5 is for model.family = "llama", and it is "bert"',
    ),
    "a key of bert": (
        '[model]\nsentences = "next"\n',
        'model.sentences = "next" is for model.family = "bert", and it is "gpt"',
    ),
    "words of a model that masks none": (
        "[data]\nwhole_words = true\n",
        'data.whole_words = true is for model.family = "bert", and it is "gpt": leave it out',
    ),
    "words of t5": (
        f"{T5}[data]\nwhole_words = true\n",
        'data.whole_words = true is for model.family = "bert", and it is "t5": leave it out',
    ),
    "special ids of a model that masks none": (
        "[data]\nspecial_ids = [1, 2, 3]\n",
        'data.special_ids = [1, 2, 3] is for model.family = "bert" or "t5", and it is "gpt"',
    ),
    "no text": (
        f'{BERT}seq_len = 6\nsentences = "order"\n',
        "model.seq_len = 6 leaves 3 tokens of text between [CLS] and [SEP]: take 7 or more",
    ),
    "no text of a phase": (
        f"{BERT}[data]\nseq_len = 3\n",
        "data.seq_len = 3 leaves 1 tokens of text between [CLS] and [SEP]: take 6 or more",
    ),
    "two ids": (
        f"{BERT}[data]\nspecial_ids = [1, 2]\n",
        "data.special_ids = [1, 2] must be three numbers",
    ),
    "one id twice": (
        f"{BERT}[data]\nspecial_ids = [1, 2, 2]\n",
        "data.special_ids = [1, 2, 2] must be three numbers",
    ),
    "an id beyond the vocabulary": (
        f"{BERT}[data]\nspecial_ids = [1, 2, 260]\n",
        "model.vocab = 260 has no room for [CLS], [SEP], [MASK] and a token: set it to 261 or more",
    ),
    "no room for special tokens": (
        '[model]\nfamily = "bert"\nvocab = 3\n[data]\nsource = "synthetic"\n',
        "model.vocab = 3 has no room for [CLS], [SEP], [MASK] and a token: set it to 4 or more",
    ),
    "documents": (
        f'{BERT}[data]\ndocuments = "masked"\n',
        'data.documents = "masked" is not for model.family = "bert"',
    ),
    "growing sequences": (
        f"{BERT}[schedule]\nseq_len = [[0, 64]]\n",
        'schedule.seq_len = [[0, 64]] is not for model.family = "bert"',
    ),
    "a loss by pieces": (
        f'{BERT}[memory]\nloss_chunk = "auto"\n',
        'memory.loss_chunk = "auto" is not for model.family = "bert"',
    ),
    "a key of t5": (
        "[model]\nspan_length = 2.0\n",
        'model.span_length = 2.0 is for model.family = "t5", and it is "gpt"',
    ),
    "a key of bert and t5": (
        "[model]\nmasked_fraction = 0.2\n",
        'model.masked_fraction = 0.2 is for model.family = "bert" or "t5", and it is "gpt"',
    ),
    "a key of llama in t5": (
        f"{T5}kv_heads = 2\n",
        'model.kv_heads = 2 is for model.family = "llama", and it is "t5"',
    ),
    "no sum of encoder and decoder": (
        f"{T5}seq_len = 564\n",
        "model.seq_len = 564 is no sum of the tokens of encoder and decoder that a sample has with "
        "model.masked_fraction = 0.15 and model.span_length = 3.0: take 562 (460 + 102) or "
        "565 (461 + 104)",
    ),
    "no sum of a phase": (
        f"{T5}[data]\nseq_len = 35\n",
        "data.seq_len = 35 is no sum of the tokens of encoder and decoder that a sample has with "
        "model.masked_fraction = 0.15 and model.span_length = 3.0: take 34 (28 + 6) or 37 (29 + 8)",
    ),
    "no sample is so short": (f"{T5}seq_len = 5\n", "span_length = 3.0: take 6 (3 + 3)"),
    "one layer": (
        f"{T5}layers = 1\n",
        "model.layers = 1 with model.encoder_layers = 0 must leave a block or more to the encoder, "
        "and to the decoder: take 2 or more",
    ),
    "no decoder": (
        f"{T5}layers = 6\nencoder_layers = 6\n",
        "model.layers = 6 with model.encoder_layers = 6 must leave a block or more",
    ),
    "odd classes of distances": (
        f"{T5}position_buckets = 33\n",
        "model.position_buckets = 33 must be even, and half of them",
    ),
    "distances that end before they begin": (
        f"{T5}position_reach = 16\n",
        "fewer than model.position_reach = 16",
    ),
    "ids of t5": (
        f"{T5}[data]\nspecial_ids = [0, 1]\n",
        "data.special_ids = [0, 1] must be three numbers, the ids of <pad>, </s> and <extra_id_0>",
    ),
    "sentinels below zero": (
        f"{T5}seq_len = 626\n[data]\nspecial_ids = [50, 51, 26]\n",
        "data.special_ids = [50, 51, 26] gives the sentinels of the 28 spans of "
        "model.seq_len = 626 the ids from 26 down to -1",
    ),
    "the end among the sentinels": (
        f"{T5}seq_len = 626\n[data]\nspecial_ids = [0, 72, 99]\n",
        "the ids from 99 down to 72: they must be 0 or more, and not those of <pad> and </s>",
    ),
    "no room for sentinels": (
        '[model]\nfamily = "t5"\nvocab = 30\nseq_len = 626\n[data]\nsource = "synthetic"\n',
        "model.vocab = 30 has no room for <pad>, </s>, 28 sentinels and a token: set it to 31",
    ),
    "a sentinel beyond the vocabulary": (
        f"{T5}[data]\nspecial_ids = [0, 1, 500]\n",
        "and a token: set it to 501 or more (data.special_ids = [0, 1, 500])",
    ),
    "documents of t5": (
        f'{T5}[data]\ndocuments = "padded"\n',
        'data.documents = "padded" is not for model.family = "t5"',
    ),
    "growing sequences of t5": (
        f"{T5}[schedule]\nseq_len = [[0, 64]]\n",
        'schedule.seq_len = [[0, 64]] is not for model.family = "t5"',
    ),
    "a loss of t5 by pieces": (
        f'{T5}[memory]\nloss_chunk = "auto"\n',
        'memory.loss_chunk = "auto" is not for model.family = "t5"',
    ),
}


@pytest.mark.parametrize(("text", "said"), CASES.values(), ids=CASES)
def test_contradictions_show_all_numbers(write: Write, text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load(write(text))
    assert said in str(error.value)


ALLOWED = [
    "seq_len = 626",
    "seq_len = 6",
    "layers = 2\nencoder_layers = 1",
    "position_reach = 17",
    "seq_len = 626\n[data]\nspecial_ids = [28, 29, 27]",
    "seq_len = 626\n[data]\nspecial_ids = [0, 71, 99]",
    "seq_len = 626\n[data]\nspecial_ids = [0, 100, 99]\nseq_len = 37",
]


@pytest.mark.parametrize("text", ALLOWED)
def test_what_is_next_to_a_contradiction_is_allowed(write: Write, text: str) -> None:
    assert load(write(f"{T5}{text}\n")).spec.model.family == "t5"


def test_every_length_that_is_named_is_one_of_a_sample(write: Write) -> None:
    named = set()
    for length in range(500, 600):
        try:
            load(write(f"{T5}seq_len = {length}\nmasked_fraction = 0.4\nspan_length = 1.0\n"))
        except InputError as error:
            below, above = (int(one) for one in re.findall(r"(\d+) \(\d+ \+", str(error)))
            assert below < length < above
            named |= {below, above}
    assert named
    for length in named:
        load(write(f"{T5}seq_len = {length}\nmasked_fraction = 0.4\nspan_length = 1.0\n"))


def test_every_family_says_which_keys_are_its_own() -> None:
    assert KEYS_OF.keys() == FAMILIES.keys()
