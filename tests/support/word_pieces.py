"""A small tokenizer of word pieces."""

from pathlib import Path


def trained_word_pieces(folder: Path) -> Path:
    """Return a tokenizer as BERT's are."""
    import tokenizers
    from tokenizers.trainers import WordPieceTrainer

    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        ["the words of text, and wording worded others otherwise"] * 9,
        WordPieceTrainer(vocab_size=60, special_tokens=special),
    )
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
