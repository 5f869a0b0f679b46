"""Keys that belong to other families, and masked samples that cannot be."""

import pytest

from hpczero.errors import InputError
from hpczero.model.families import FAMILIES
from hpczero.spec.load import load
from hpczero.spec.model import KEYS_OF
from tests.support.specs import Write

BERT = '[model]\nfamily = "bert"\nvocab = 260\n'
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
        "data.whole_words = true is for models that predict masked tokens, and model.family is ",
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
}


@pytest.mark.parametrize(("text", "said"), CASES.values(), ids=CASES)
def test_contradictions_show_all_numbers(write: Write, text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load(write(text))
    assert said in str(error.value)


def test_every_family_says_which_keys_are_its_own() -> None:
    assert KEYS_OF.keys() == FAMILIES.keys()
