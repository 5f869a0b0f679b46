"""Generation with a cache chooses the tokens that the whole text would."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hpczero.errors import HpczeroError
from hpczero.inference.generate import Request, Sampling, generate
from hpczero.model.batch import MicroBatch
from tests.support.inference import MODELS, model_of, random_module

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14, 15, 16, 17, 18]]
CPU = torch.device("cpu")
LONGEST = 40


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Fill what torch leaves as it was: what nobody has written must not be read."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def answers(module: Any, request: Request, choice: Sampling) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in request.prompts]
    for made in generate(module, request, choice, CPU):
        for place, token in made.items():
            found[place].append(token)
    return found


def without_cache(
    module: Any, prompt: Sequence[int], number: int, request: Request, choice: Sampling
) -> list[int]:
    """The answer of the model if it reads the whole text for each token, one text alone."""
    text = list(prompt)
    while len(text) < min(len(prompt) + request.most, request.limit):
        tokens = torch.tensor([text])
        batch = MicroBatch(tokens, tokens, torch.tensor([0]), 0, 0)
        *layers, head = module.layers()
        x = tokens
        with torch.no_grad():
            for layer in layers:
                x = layer(x, batch)
            logits = head.scores(x)[:, -1]
        text += choice.next(logits, torch.tensor([number]), torch.tensor([len(text)])).tolist()
        if text[-1] == request.end:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("choice", [Sampling(0.0), Sampling(0.8, 10, 0.9, seed=3)])
@pytest.mark.parametrize("most", [20, 1000])
@pytest.mark.few(6)
def test_the_cache_changes_no_token(
    name: str, choice: Sampling, most: int, new_memory_is_nan: None
) -> None:
    """Prompts of several lengths together, ends of documents and of the model's sequences."""
    module = random_module(model_of(name))
    request = Request(PROMPTS, most, LONGEST, end=0, first=5)
    found = answers(module, request, choice)
    for number, prompt in enumerate(PROMPTS):
        expected = without_cache(module, prompt, number + 5, request, choice)
        assert found[number] == expected
    ends = {len(prompt) + len(answer) for prompt, answer in zip(PROMPTS, found, strict=True)}
    assert most == 20 or LONGEST in ends


def test_prompts_of_one_length_are_together_what_each_is_alone() -> None:
    module = random_module(model_of("relative"))
    choice = Sampling(seed=2)
    prompts = [PROMPTS[1], PROMPTS[3]]
    together = answers(module, Request(prompts, 15, LONGEST, end=0), choice)
    for number, prompt in enumerate(prompts):
        alone = answers(module, Request([prompt], 15, LONGEST, end=0, first=number), choice)
        assert together[number] == alone[0]


def test_each_token_goes_through_the_model_once() -> None:
    module = random_module(model_of("llama"))
    seen = []
    module.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2]))
    found = answers(module, Request(PROMPTS[:3], 6, LONGEST, end=99), Sampling(0.0))
    assert seen == [(3, 7), *[(3, 1)] * 5]
    assert [len(answer) for answer in found] == [6, 6, 6]


def test_answers_that_have_ended_are_computed_no_further() -> None:
    module = random_module(model_of("gpt"))
    request = Request(PROMPTS[:2], 1000, 9, end=99)
    rows = []
    module.blocks[0].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    assert [len(answer) for answer in answers(module, request, Sampling(0.0))] == [6, 2]
    assert rows == [2, 2, 1, 1, 1, 1]


def test_draws_have_the_probabilities_of_the_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    count = 20_000
    drawn = Sampling(temperature=0.5, seed=1).next(
        logits.expand(count, -1), torch.arange(count), torch.tensor(7).expand(count)
    )
    shares = torch.bincount(drawn, minlength=4) / count
    expected = (logits[0] / 0.5).softmax(0)
    assert (shares - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def drawn_of(choice: Sampling, logits: torch.Tensor) -> Counter[int]:
    count = 2000
    found = choice.next(
        logits.expand(count, -1), torch.zeros(count, dtype=torch.int64), torch.arange(count)
    )
    return Counter(found.tolist())


def test_only_the_likeliest_are_drawn() -> None:
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.05, 0.05]]).log()
    assert set(drawn_of(Sampling(), logits)) == {0, 1, 2, 3, 4}
    assert set(drawn_of(Sampling(top_k=2), logits)) == {0, 2}
    assert set(drawn_of(Sampling(top_p=0.75), logits)) == {0, 2}
    assert set(drawn_of(Sampling(top_p=0.85), logits)) == {0, 2, 1}
    assert set(drawn_of(Sampling(top_p=0.01), logits)) == {0}
    assert set(drawn_of(Sampling(top_k=99), logits)) == {0, 1, 2, 3, 4}
    # of the two that are left the first has the share 0.5 / 0.8
    both = drawn_of(Sampling(top_k=2, top_p=0.7), logits)
    assert set(both) == {0, 2}
    assert set(drawn_of(Sampling(top_k=2, top_p=0.6), logits)) == {0}


def test_a_temperature_next_to_0_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 3.0, 2.9999, -9.0]])
    for temperature in (1e-38, 1e-45, 1e-300):
        assert set(drawn_of(Sampling(temperature), logits)) == {1}


def test_a_model_of_nan_is_said() -> None:
    module = random_module(model_of("llama"))
    with torch.no_grad():
        module.blocks[1].feed_forward.down.weight[0, 0] = torch.nan
    with pytest.raises(HpczeroError, match="NaN"):
        answers(module, Request(PROMPTS[:1], 3, LONGEST, end=0), Sampling(0.0))


def test_ids_that_stand_for_nothing_are_not_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 9.0]])
    assert set(drawn_of(Sampling(ids=3), logits)) == {0, 1, 2}
    assert set(drawn_of(Sampling(temperature=0.0, ids=3), logits)) == {0}


def test_a_seed_a_prompt_and_a_position_are_a_draw() -> None:
    logits = torch.zeros(1, 1000)
    at = torch.tensor([3]), torch.tensor([4])
    first = Sampling(seed=1).next(logits, *at)
    assert first == Sampling(seed=1).next(logits, *at)
    assert first != Sampling(seed=2).next(logits, *at)
    assert first != Sampling(seed=1).next(logits, at[0] + 1, at[1])
    assert first != Sampling(seed=1).next(logits, at[0], at[1] + 1)
