"""`hpczero data tokenizer train`, `show`: make a tokenizer of one's own, and look into any."""

import json
import os
from argparse import Namespace
from pathlib import Path

from hpczero.data.corpus import find
from hpczero.data.token_file import tokenizer_at
from hpczero.data.train_tokenizer import END_OF_DOCUMENT, train_bpe
from hpczero.errors import InputError
from hpczero.safe_files import written_durably
from hpczero.text import printable

_LEAST = 257  # ids: the bytes, and the end of a document
_MOST = 2**20
_SAMPLE = "def main():\n    print('Grüße, 世界', 3.14159)\n"


def train(options: Namespace) -> int:
    output = Path(options.output)
    if output.suffix != ".json":
        raise InputError(f"the output {printable(str(output))} must end in .json")
    if not _LEAST <= options.vocabulary <= _MOST:
        raise InputError(
            f"--vocabulary {options.vocabulary}: from {_LEAST} (the bytes, and the end of a "
            f"document) to {_MOST:,}"
        )
    corpus = find(options.paths)
    if output.exists():
        raise InputError(f"{printable(str(output))} exists already and is left as it is")
    content, vocabulary = train_bpe(corpus, options.vocabulary, options.field)
    with written_durably(output) as file:
        file.write(content.encode())
    print(f"wrote {printable(str(output))}: {vocabulary:,} ids, {END_OF_DOCUMENT} ends a document")
    if vocabulary < options.vocabulary:
        print(f"WARN the text has no more pairs: {options.vocabulary:,} were asked for")
    return 0


def show(options: Namespace) -> int:
    made = tokenizer_at(options.tokenizer, options.end_of_document)
    given = _SAMPLE if options.text is None else options.text
    text = os.fsencode(given).decode(errors="replace")  # a terminal's bytes may be no text
    tokens = [int(token) for token in made.encode([text])[0]]
    size = len(text.encode("utf-8", errors="replace"))
    facts = {
        "name": made.name,
        "vocabulary": made.vocabulary,
        "end_of_document": made.end_of_document,
        "files": {name: len(content) for name, content in made.files.items()},
        "text": text,
        "tokens": tokens,
        "pieces": [made.decode([token]) for token in tokens],
        "bytes_per_token": size / len(tokens) if tokens else None,
        "same_text_again": made.decode(tokens) == text,
    }
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(f"{made.name}: {made.vocabulary:,} ids, {made.end_of_document} ends a document")
    print(
        " ".join(
            printable(json.dumps(made.decode([token]), ensure_ascii=False)) for token in tokens
        )
    )
    print(f"{len(tokens)} tokens of {size} bytes, {size / max(1, len(tokens)):.2f} bytes each")
    if not facts["same_text_again"]:
        print("WARN these tokens do not give the same text again: the tokenizer changes text")
    return 0
