"""The demo model answers the speculation benchmark's requests with text of the named kind."""

import json
import re

import pytest
from mlx_lm.generate import batch_generate

from services.commands.bench.speculation.request_generator import (
    CODE,
    COPY,
    PROSE,
    RequestGenerator,
)
from tests.demo_model.demo_answers import DemoModel

_COUNT = 8


def _written(demo: DemoModel, kind: str, tokens: int) -> list[tuple[str, str]]:
    """Return what was asked for and what the model writes."""
    requests = RequestGenerator(kind, 1, is_demo=True)
    asked = [requests.next() for _ in range(_COUNT)]
    if kind == PROSE:
        texts = [fields["prompt"] for fields in asked]
        prompts = [demo.tokenizer.encode(text) for text in texts]
    else:
        texts = [fields["messages"][0]["content"] for fields in asked]
        prompts = [
            demo.tokenizer.apply_chat_template(fields["messages"], add_generation_prompt=True)
            for fields in asked
        ]
    answers = batch_generate(demo.model, demo.tokenizer, prompts, max_tokens=tokens).texts
    return list(zip(texts, answers, strict=True))


def _repeated_share(demo: DemoModel, text: str) -> float:
    """Return which share of a text's tokens goes on as its last two tokens did before."""
    ids: list[int] = demo.tokenizer.encode(text)
    followed: dict[tuple[int, int], int] = {}
    hits = 0
    for place in range(2, len(ids)):
        pair = ids[place - 2], ids[place - 1]
        hits += followed.get(pair) == ids[place]
        followed[pair] = ids[place]
    return hits / len(ids)


def test_copies_are_copies(demo: DemoModel) -> None:
    """The text of the prompt, to the last character."""
    for asked, answer in _written(demo, COPY, 256):
        assert answer == asked.partition("\n")[2]


def test_lists_are_whole_and_repeat_themselves(demo: DemoModel) -> None:
    """As many lines as asked for; JSON that parses."""
    for asked, answer in _written(demo, CODE, 256):
        if wanted := re.search(r'"(\w+)" (\d+) times', asked):
            lines = [f"{number}. {wanted[1]}" for number in range(1, int(wanted[2]) + 1)]
            assert answer == "\n".join(lines)
        else:
            words = asked.partition(" the words ")[2].replace(" and ", ", ").split(", ")
            assert json.loads(answer) == words


@pytest.mark.proof
def test_prose_hardly_repeats_itself(demo: DemoModel) -> None:
    """Sentence after sentence to the last token; lists repeat themselves far more."""
    written = _written(demo, PROSE, 160)
    shares = [_repeated_share(demo, answer) for _, answer in written]
    lists = [_repeated_share(demo, answer) for _, answer in _written(demo, CODE, 256)[::2]]
    print(f"prose {max(shares):.2f}, lists {min(lists):.2f}")
    assert all(answer.count(". ") >= 3 for _, answer in written)
    assert max(shares) < 0.15
    assert min(lists) > 3 * max(shares)
