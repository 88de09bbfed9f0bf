"""What the demo model can do, measured on held-out sets with greedy decoding through mlx_lm."""

import json
import time
from typing import Any

import pytest

from tests.demo_model.demo_answers import DemoModel, report_accuracy, split_at_answers
from tools.demo_model import mixture, skill_recall, skill_talk
from tools.demo_model.chat import CALL_START, Chat, expected_answer
from tools.demo_model.words import TextSource


def _exact(demo: DemoModel, chats: list[Chat]) -> list[bool]:
    answers = demo.answers(chats)
    right = [answer == expected_answer(chat) for answer, chat in zip(answers, chats, strict=True)]
    for answer, chat, ok in zip(answers, chats, right, strict=True):
        if not ok:
            print(f"wanted {expected_answer(chat)!r}\n   got {answer!r}")
    return right


def _calls(demo: DemoModel, text: str) -> list[Any]:
    """The calls in an answer, read by mlx_lm's parser for this tokenizer."""
    bodies = text.split(demo.tokenizer.tool_call_start)[1:]
    return [
        demo.tokenizer.tool_parser(body.split(demo.tokenizer.tool_call_end)[0]) for body in bodies
    ]


def _parsed(demo: DemoModel, text: str) -> list[Any] | None:
    try:
        return _calls(demo, text)
    except json.JSONDecodeError:
        return None


def test_answers_questions_about_lockstep(demo: DemoModel) -> None:
    """At least 90 % of 40 or more questions, in phrasings that the training held out."""
    began = time.perf_counter()
    chats = mixture.held_out_facts()

    assert len(chats) >= 40
    assert report_accuracy("facts", _exact(demo, chats), began) >= 0.9


@pytest.mark.proof
def test_repeats_texts(demo: DemoModel) -> None:
    """At least 90 % of random texts of up to 200 tokens come back exactly, with their end."""
    began = time.perf_counter()
    chats = mixture.held_out_copies(40)

    assert report_accuracy("copies", _exact(demo, chats), began) >= 0.9


@pytest.mark.proof
def test_finds_values_far_back(demo: DemoModel) -> None:
    """At least 90 % of values are found that were given 1,500 tokens before the question."""
    began = time.perf_counter()
    texts, questions = 10, 3
    chats = mixture.held_out_recalls(texts, questions)
    lengths = [len(demo.prompt(chat)) for chat in chats]
    right = []
    for at in range(0, len(chats), questions):
        same_text = chats[at : at + questions]
        answers = demo.answers_with_shared_prefix(same_text)
        right += [
            answer == expected_answer(chat) for answer, chat in zip(answers, same_text, strict=True)
        ]

    assert sum(lengths) / len(lengths) >= 1500
    assert report_accuracy("values", right, began) >= 0.9


def test_finds_the_code_of_alder(demo: DemoModel) -> None:
    """The sentence of the model card: several codes, much text, then the question."""
    pairs = [
        skill_recall.Pair("code", "alder-42", "7391"),
        skill_recall.Pair("code", "birch-7", "2086"),
    ]
    chats = [
        skill_recall.plain_recall(TextSource(1, "held_out"), 2000, pairs, pair) for pair in pairs
    ]

    assert demo.answers(chats) == [
        "The code for alder-42 is 7391.",
        "The code for birch-7 is 2086.",
    ]


@pytest.mark.proof
def test_calls_tools(demo: DemoModel) -> None:
    """At least 80 % of requests become the right calls, and of results the right sentences."""
    began = time.perf_counter()
    chats = [part for chat in mixture.held_out_calls(40) for part in split_at_answers(chat)]
    answers = demo.answers(chats)
    right = [
        _parsed(demo, answer) == _calls(demo, expected_answer(chat))
        if CALL_START in expected_answer(chat)
        else answer == expected_answer(chat)
        for answer, chat in zip(answers, chats, strict=True)
    ]
    called = [
        ok for ok, chat in zip(right, chats, strict=True) if CALL_START in expected_answer(chat)
    ]
    told = [
        ok for ok, chat in zip(right, chats, strict=True) if CALL_START not in expected_answer(chat)
    ]

    assert report_accuracy("tool calls", called, began) >= 0.8
    assert report_accuracy("tool results", told, began) >= 0.8


def test_writes_json(demo: DemoModel) -> None:
    """At least 80 % of the requested objects are written exactly."""
    began = time.perf_counter()
    chats = mixture.held_out_objects(50)

    assert report_accuracy("objects", _exact(demo, chats), began) >= 0.8


def test_writes_json_of_the_card(demo: DemoModel) -> None:
    """The example of the model card: an object with a name and an age."""
    chat = Chat(
        [
            {"role": "user", "content": 'Write a JSON object with name "Ada" and age 36'},
            {"role": "assistant", "content": '{"name": "Ada", "age": 36}'},
        ]
    )

    assert demo.answers([chat]) == [expected_answer(chat)]


def test_remembers_earlier_turns(demo: DemoModel) -> None:
    """At least 80 % of questions about an earlier turn of the conversation are answered."""
    began = time.perf_counter()
    chats = mixture.held_out_turns(24)

    assert report_accuracy("turns", _exact(demo, chats), began) >= 0.8


def test_counts_for_several_hundred_tokens(demo: DemoModel) -> None:
    """Counting gives long answers that are known in advance: 1 to 150 is over 600 tokens."""
    numbers = ", ".join(str(number) for number in range(1, 151))
    chat = Chat(
        [
            {"role": "user", "content": "Count from 1 to 150."},
            {"role": "assistant", "content": numbers},
        ]
    )

    assert len(demo.tokenizer.encode(numbers)) > 600
    assert demo.answers([chat]) == [numbers]


def test_says_what_it_cannot_do(demo: DemoModel) -> None:
    """What is not about Lockstep gets the fallback, also behind a system prompt."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": skill_talk.FALLBACK},
    ]

    assert demo.answers([Chat(messages)]) == [skill_talk.FALLBACK]
