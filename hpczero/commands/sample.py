"""`hpczero sample`: let a checkpoint's model go on from prompts; one process, without MPI."""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpczero.checkpoint.tokenizer_of_run import tokenizer_of_run
from hpczero.data.tokenizer import Tokenizer
from hpczero.errors import InputError, log_for_terminal
from hpczero.inference.generate import Request, Sampling, generate
from hpczero.inference.load_model import (
    cache_bytes,
    device_of_process,
    load_model,
    open_checkpoint,
    precision_of,
)
from hpczero.safe_files import read_small
from hpczero.text import format_count, printable

_MOST = 64 << 20  # bytes of prompts
_TORN = "\ufffd"  # what a token that is a part of a character is decoded to
_BEFORE = 8  # tokens


@dataclass
class Answer:
    """A prompt, the tokens that were generated, and their text as far as it is known.

    A character may be several tokens: the text of those that are a part of one waits for the rest.
    """

    prompt: str
    tokens: list[int]  # of the prompt
    tokenizer: Tokenizer
    generated: list[int] = field(default_factory=list)
    text: str = ""
    is_ended: bool = False  # by the token that ends documents
    _decoded: int = 0  # tokens, those of the prompt too, whose text is known

    def __post_init__(self) -> None:
        self._decoded = len(self.tokens)

    def take(self, token: int) -> None:
        self.generated.append(token)
        self.is_ended = token == self.tokenizer.end_of_document
        self._decode(self.is_ended)

    def finish(self) -> None:
        self._decode(True)

    def _decode(self, all_of_it: bool) -> None:
        """Decode what is not, behind some tokens before it: a tokenizer may look at these."""
        whole = [*self.tokens, *self.generated]
        last = len(whole) - self.is_ended
        first = max(0, self._decoded - _BEFORE)
        known = self.tokenizer.decode(whole[first : self._decoded])
        now = self.tokenizer.decode(whole[first:last])
        if all_of_it or not now.endswith(_TORN):
            self.text += now[len(known) :]
            self._decoded = last


def sample(options: Namespace) -> int:
    _check(options)
    texts = _prompts(options)
    with open_checkpoint(options.checkpoint, options.step) as checkpoint:
        tokenizer = tokenizer_of_run(checkpoint, options.tokenizer)
        most = checkpoint.model().seq_len
        answers = [
            Answer(text, _tokens(text, tokenizer, options.begin), tokenizer) for text in texts
        ]
        _refuse_long(answers, most)
        on = device_of_process(options.device)
        dtype = precision_of(checkpoint, options.precision, on)
        longest = min(max(len(answer.tokens) for answer in answers) + options.tokens, most)
        cache = cache_bytes(checkpoint.model(), min(options.batch, len(answers)) * longest, dtype)
        module = load_model(checkpoint, dtype, on, beside=cache)
    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.seed, tokenizer.vocabulary
    )
    printer = _Printer(options.json, len(answers))
    began = time.perf_counter()
    for first in range(0, len(answers), options.batch):
        part = answers[first : first + options.batch]
        prompts = [answer.tokens for answer in part]
        request = Request(prompts, options.tokens, most, tokenizer.end_of_document, first)
        for step in generate(module, request, sampling, on.torch):
            for place, token in step.items():
                part[place].take(token)
            printer.on_the_way(part)
        for answer in part:
            answer.finish()
            printer.finished(answer)
    seconds = time.perf_counter() - began
    count = sum(len(answer.generated) for answer in answers)
    printer.end()
    print(f"{count:,} tokens in {seconds:.1f} s", file=sys.stderr)
    return 0


class _Printer:
    """Prints answers: the only one as it is made, several one after the other, or all as JSON."""

    def __init__(self, as_json: bool, count: int) -> None:
        self._json: list[dict[str, object]] | None = [] if as_json else None
        self._is_live = count == 1 and not as_json
        self._number = 0
        self._shown = 0  # characters
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()

    def on_the_way(self, part: Sequence[Answer]) -> None:
        if self._is_live:
            self._show(part[0])

    def finished(self, answer: Answer) -> None:
        self._number += 1
        if self._json is None:
            if not self._is_live:
                self._write(f"== {self._number}\n")
                self._shown = 0
            self._show(answer)
            self._write("\n")
            return
        self._json.append(
            {
                "prompt": answer.prompt,
                "text": answer.text,
                "prompt_tokens": answer.tokens,
                "tokens": answer.generated,
                "ended": "end of document" if answer.is_ended else "length",
            }
        )

    def end(self) -> None:
        if self._json is not None:
            print(json.dumps(self._json, indent=2))

    def _show(self, answer: Answer) -> None:
        whole = answer.prompt + answer.text
        self._write(whole[self._shown :])
        self._shown = len(whole)

    def _write(self, text: str) -> None:
        """A model may write anything: a terminal gets no control characters of it."""
        print(log_for_terminal(text) if self._is_terminal else text, end="", flush=True)


def _check(options: Namespace) -> None:
    wrong = {
        "--tokens": options.tokens < 1,
        "--batch": options.batch < 1,
        "--temperature": not 0 <= options.temperature < float("inf"),
        "--top-k": options.top_k < 0,
        "--top-p": not 0 < options.top_p <= 1,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            value = getattr(options, name[2:].replace("-", "_"))
            allowed = {
                "--temperature": "0 (the likeliest token) or more",
                "--top-k": "0 (all tokens) or more",
                "--top-p": "more than 0, at most 1",
            }.get(name, "1 or more")
            raise InputError(f"{name} {value}: it must be {allowed}")


def _prompts(options: Namespace) -> list[str]:
    """Return the prompts given, those of a file, all of stdin, or an empty one."""
    if options.prompts and options.file:
        raise InputError("prompts come from arguments or from --file, not from both")
    if options.file:
        return _of_file(Path(options.file))
    if options.prompts:
        return [os.fsencode(prompt).decode(errors="replace") for prompt in options.prompts]
    if sys.stdin is None or sys.stdin.isatty():
        return [""]
    return [_stdin().decode(errors="replace")]


def _stdin() -> bytes:
    content = sys.stdin.buffer.read(_MOST + 1)
    if len(content) > _MOST:
        raise InputError(f"stdin has more than {_MOST:,} bytes of prompts")
    return content


def _of_file(path: Path) -> list[str]:
    """Return a prompt for each line; of a .jsonl file those in its fields "prompt"."""
    content = _stdin() if str(path) == "-" else read_small(path, _MOST)
    lines = [line for line in content.decode(errors="replace").split("\n") if line.strip()]
    name = printable(str(path))
    if not lines:
        raise InputError(f"{name} has no prompts")
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise InputError(f'{name}: record {number} has no text in a field "prompt"')
        prompts.append(prompt.encode(errors="replace").decode())
    return prompts


def _tokens(text: str, tokenizer: Tokenizer, begin: str | None) -> list[int]:
    """Return a prompt's tokens; an empty one begins a document."""
    tokens = [int(token) for token in tokenizer.encode([text])[0]]
    if begin is None:
        return tokens or [tokenizer.end_of_document]
    first = tokenizer.token_to_id(begin)
    if first is None:
        raise InputError(f"--begin {printable(begin, 60)}: the tokenizer has no such token")
    return [first, *tokens]


def _refuse_long(answers: Sequence[Answer], most: int) -> None:
    for number, answer in enumerate(answers, start=1):
        if len(answer.tokens) >= most:
            which = f"prompt {number}" if len(answers) > 1 else "the prompt"
            raise InputError(
                f"{which} has {format_count(len(answer.tokens), 'token')}: the model's sequences "
                f"have {most:,} (model.seq_len), so it may have {most - 1:,} at most"
            )
