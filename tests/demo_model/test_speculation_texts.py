"""Texts that the demo model generates for the requests of the speculation benchmark."""

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


def _generate(demo: DemoModel, kind: str, tokens: int) -> list[tuple[str, str]]:
    """Return the prompt and the generated text of each request."""
    generator = RequestGenerator(kind, 1, is_demo=True)
    requests = [generator.next() for _ in range(_COUNT)]
    if kind == PROSE:
        texts = [fields["prompt"] for fields in requests]
        prompts = [demo.tokenizer.encode(text) for text in texts]
    else:
        texts = [fields["messages"][0]["content"] for fields in requests]
        prompts = [
            demo.tokenizer.apply_chat_template(fields["messages"], add_generation_prompt=True)
            for fields in requests
        ]
    answers = batch_generate(demo.model, demo.tokenizer, prompts, max_tokens=tokens).texts
    return list(zip(texts, answers, strict=True))


def _share_of_repeated_bigrams(demo: DemoModel, text: str) -> float:
    """Return the share of tokens that follow the preceding two tokens as they did before."""
    ids: list[int] = demo.tokenizer.encode(text)
    followed: dict[tuple[int, int], int] = {}
    repeated = 0
    for position in range(2, len(ids)):
        pair = ids[position - 2], ids[position - 1]
        repeated += followed.get(pair) == ids[position]
        followed[pair] = ids[position]
    return repeated / len(ids)


def test_demo_model_repeats_prompt_text_exactly_for_copy_request(demo: DemoModel) -> None:
    """The model repeats the text of the prompt exactly."""
    for prompt, answer in _generate(demo, COPY, 256):
        assert answer == prompt.partition("\n")[2]


def test_demo_model_writes_complete_list_or_valid_json_for_code_request(demo: DemoModel) -> None:
    """A list has the requested number of lines, and JSON contains the requested words."""
    for prompt, answer in _generate(demo, CODE, 256):
        if wanted := re.search(r'"(\w+)" (\d+) times', prompt):
            lines = [f"{number}. {wanted[1]}" for number in range(1, int(wanted[2]) + 1)]
            assert answer == "\n".join(lines)
        else:
            words = prompt.partition(" the words ")[2].replace(" and ", ", ").split(", ")
            assert json.loads(answer) == words


@pytest.mark.proof
def test_demo_model_writes_prose_with_little_repetition_for_prose_request(demo: DemoModel) -> None:
    """The text has sentences up to the last token, and repeats far less than a list."""
    written = _generate(demo, PROSE, 160)
    shares = [_share_of_repeated_bigrams(demo, answer) for _, answer in written]
    lists = [
        _share_of_repeated_bigrams(demo, answer) for _, answer in _generate(demo, CODE, 256)[::2]
    ]
    print(f"prose {max(shares):.2f}, lists {min(lists):.2f}")
    assert all(answer.count(". ") >= 3 for _, answer in written)
    assert max(shares) < 0.15
    assert min(lists) > 3 * max(shares)
