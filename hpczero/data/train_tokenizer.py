"""Training a byte-level BPE tokenizer (Sennrich et al. 2016, Radford et al. 2019) on a corpus."""

import importlib
from collections.abc import Iterator

from hpczero.data.corpus import Corpus, Place
from hpczero.data.records import records
from hpczero.data.sections import texts_of
from hpczero.data.tokenizer import library
from hpczero.errors import HpczeroError, InputError

END_OF_DOCUMENT = "<|endoftext|>"


def train_bpe(corpus: Corpus, vocabulary: int, field: str) -> tuple[str, int]:
    """Return a tokenizer.json and its number of ids; the same text gives the same one."""
    tokenizers = library("tokenizers")
    levels = importlib.import_module("tokenizers.pre_tokenizers").ByteLevel
    made = tokenizers.Tokenizer(importlib.import_module("tokenizers.models").BPE())
    made.pre_tokenizer = levels(add_prefix_space=False)
    made.decoder = importlib.import_module("tokenizers.decoders").ByteLevel()
    trainer = importlib.import_module("tokenizers.trainers").BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(levels.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_texts(corpus, field), trainer)
    return made.to_str(pretty=True) + "\n", made.get_vocab_size()


def _texts(corpus: Corpus, field: str) -> Iterator[str]:
    for source in corpus.inputs:
        try:
            for record in records(source, Place(), field):
                try:
                    yield from texts_of(record, field)[0]
                except ValueError as error:
                    raise InputError(f"{source.path}:{record.after.number}: {error}") from error
        except OSError as error:
            raise HpczeroError(f"{source.path} cannot be read: {error.strerror}") from error
