"""The tables [data] and [[data.sources]]: what a job reads."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from hpczero.spec.table import Line, Positions, Table, key

# family -> the tokens whose ids data.special_ids says
SPECIAL_TOKENS = {
    "bert": ("[CLS]", "[SEP]", "[MASK]"),
    "t5": ("<pad>", "</s>", "<extra_id_0>"),
}


class Source(Table):
    """A source of a mixture."""

    path: Line = key("stdlib", "changeable", "what data.source may be")
    weight: float = key(
        1.0, "changeable", "its share of the samples, beside the others'", gt=1e-9, le=1e9
    )
    epochs: float = key(
        0.0, "changeable", "most times that it is read; 0: without end", ge=0, le=1e6
    )


class Data(Table):
    """The text to train on."""

    source: Line = key(
        "stdlib",
        "identity",
        '"stdlib" (text of Python\'s library), "synthetic", or the path of a token file or of '
        "tokens of Megatron-LM, datatrove or numpy",
    )
    sources: Annotated[tuple[Source, ...], Field(strict=False, max_length=100)] = key(
        (),
        "changeable",
        "a mixture instead of data.source, a table [[data.sources]] for each of its sources: the "
        "one that is furthest behind its weight is next",
    )
    tokenizer: Literal["byte"] = key(
        "byte", "identity", "how text becomes tokens, when hpczero builds the file"
    )
    validation_fraction: float = key(
        0.05, "identity", "share kept for validation, where the file does not say it", ge=0, lt=1
    )
    seq_len: int = key(
        0,
        "changeable",
        "tokens in a sequence of the training; 0: model.seq_len",
        ge=0,
        le=100_000_000,
    )
    documents: Literal["packed", "masked", "padded"] = key(
        "packed",
        "changeable",
        "packed: sequences run on over the ends of documents; masked: so too, but nothing looks "
        "into another document; padded: a sequence is one document, or a piece of it",
    )
    whole_words: StrictBool = key(
        False, "changeable", "bert: the tokens of a word are masked together"
    )
    special_ids: Annotated[tuple[Positions, ...], Field(strict=False, max_length=3)] = key(
        (),
        "changeable",
        "bert: the ids of [CLS], [SEP] and [MASK]; t5: of <pad>, </s> and <extra_id_0>, from which "
        "the others go down; []: those of the tokenizer, or the next after its vocabulary",
    )
    prefetch: int = key(4, "site", "steps that the background reader is ahead", ge=1, le=1000)

    @property
    def paths(self) -> list[str]:
        """The value of data.source, or the paths of the mixture."""
        return [source.path for source in self.sources] or [self.source]
