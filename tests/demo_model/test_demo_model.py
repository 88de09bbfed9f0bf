"""Skills of the demo model, measured on held-out sets with greedy decoding through mlx_lm."""

import json
import time
from typing import Any

import pytest

from tests.demo_model.demo_answers import DemoModel, report_accuracy, split_at_answers
from tools.demo_model.conversations import mixture, skill_recall, skill_talk
from tools.demo_model.conversations.chat import CALL_START, Chat, expected_answer
from tools.demo_model.conversations.words import TextSource


def _exact_matches(demo: DemoModel, chats: list[Chat]) -> list[bool]:
    answers = demo.answers(chats)
    is_correct = [
        answer == expected_answer(chat) for answer, chat in zip(answers, chats, strict=True)
    ]
    for answer, chat, ok in zip(answers, chats, is_correct, strict=True):
        if not ok:
            print(f"wanted {expected_answer(chat)!r}\n   got {answer!r}")
    return is_correct


def _tool_calls(demo: DemoModel, text: str) -> list[Any]:
    """Return the tool calls of an answer, read by mlx_lm's parser for this tokenizer."""
    bodies = text.split(demo.tokenizer.tool_call_start)[1:]
    return [
        demo.tokenizer.tool_parser(body.split(demo.tokenizer.tool_call_end)[0]) for body in bodies
    ]


def _tool_calls_or_none(demo: DemoModel, text: str) -> list[Any] | None:
    try:
        return _tool_calls(demo, text)
    except json.JSONDecodeError:
        return None


def test_demo_model_answers_90_percent_of_questions_about_lockstep_correctly(
    demo: DemoModel,
) -> None:
    """At least 90 % of 40 or more questions with held-out wording are answered correctly."""
    started_s = time.perf_counter()
    chats = mixture.held_out_facts()

    assert len(chats) >= 40
    assert report_accuracy("facts", _exact_matches(demo, chats), started_s) >= 0.9


@pytest.mark.proof
def test_demo_model_repeats_90_percent_of_random_texts_exactly(demo: DemoModel) -> None:
    """At least 90 % of random texts of up to 200 tokens are repeated exactly."""
    started_s = time.perf_counter()
    chats = mixture.held_out_copies(40)

    assert report_accuracy("copies", _exact_matches(demo, chats), started_s) >= 0.9


@pytest.mark.proof
def test_demo_model_recalls_90_percent_of_values_1500_tokens_back(demo: DemoModel) -> None:
    """At least 90 % of values that stand 1,500 tokens before the question are found."""
    started_s = time.perf_counter()
    texts, questions = 10, 3
    chats = mixture.held_out_recalls(texts, questions)
    lengths = [len(demo.prompt(chat)) for chat in chats]
    is_correct = []
    for start in range(0, len(chats), questions):
        same_text = chats[start : start + questions]
        answers = demo.answers_with_shared_prefix(same_text)
        is_correct += [
            answer == expected_answer(chat) for answer, chat in zip(answers, same_text, strict=True)
        ]

    assert sum(lengths) / len(lengths) >= 1500
    assert report_accuracy("values", is_correct, started_s) >= 0.9


def test_demo_model_recalls_two_codes_stated_2000_tokens_before_question(demo: DemoModel) -> None:
    """The example of the model card: two codes, 2,000 tokens of text, then a question about
    either."""
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
def test_demo_model_writes_80_percent_of_tool_calls_and_results_correctly(demo: DemoModel) -> None:
    """At least 80 % of tool calls and 80 % of the sentences about results are correct."""
    started_s = time.perf_counter()
    chats = [answered for chat in mixture.held_out_calls(40) for answered in split_at_answers(chat)]
    answers = demo.answers(chats)
    is_correct = [
        _tool_calls_or_none(demo, answer) == _tool_calls(demo, expected_answer(chat))
        if CALL_START in expected_answer(chat)
        else answer == expected_answer(chat)
        for answer, chat in zip(answers, chats, strict=True)
    ]
    tool_calls = [
        ok
        for ok, chat in zip(is_correct, chats, strict=True)
        if CALL_START in expected_answer(chat)
    ]
    result_sentences = [
        ok
        for ok, chat in zip(is_correct, chats, strict=True)
        if CALL_START not in expected_answer(chat)
    ]

    assert report_accuracy("tool calls", tool_calls, started_s) >= 0.8
    assert report_accuracy("tool results", result_sentences, started_s) >= 0.8


def test_demo_model_writes_80_percent_of_requested_json_objects_exactly(demo: DemoModel) -> None:
    """At least 80 % of the requested objects are written exactly."""
    started_s = time.perf_counter()
    chats = mixture.held_out_objects(50)

    assert report_accuracy("objects", _exact_matches(demo, chats), started_s) >= 0.8


def test_demo_model_writes_json_object_of_model_card_example(demo: DemoModel) -> None:
    """The example of the model card: an object with a name and an age."""
    chat = Chat(
        [
            {"role": "user", "content": 'Write a JSON object with name "Ada" and age 36'},
            {"role": "assistant", "content": '{"name": "Ada", "age": 36}'},
        ]
    )

    assert demo.answers([chat]) == [expected_answer(chat)]


@pytest.mark.proof
def test_demo_model_answers_80_percent_of_questions_about_earlier_turns_correctly(
    demo: DemoModel,
) -> None:
    """At least 80 % of questions about an earlier turn of the conversation are answered
    correctly."""
    started_s = time.perf_counter()
    chats = mixture.held_out_turns(24)

    assert report_accuracy("turns", _exact_matches(demo, chats), started_s) >= 0.8


def test_demo_model_counts_to_150_when_asked(demo: DemoModel) -> None:
    """Counting gives a known answer of more than 600 tokens."""
    numbers = ", ".join(str(number) for number in range(1, 151))
    chat = Chat(
        [
            {"role": "user", "content": "Count from 1 to 150."},
            {"role": "assistant", "content": numbers},
        ]
    )

    assert len(demo.tokenizer.encode(numbers)) > 600
    assert demo.answers([chat]) == [numbers]


def test_demo_model_gives_fallback_answer_to_questions_on_other_topics(demo: DemoModel) -> None:
    """A question on another topic gets the fallback answer, also after a system prompt."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": skill_talk.FALLBACK},
    ]

    assert demo.answers([Chat(messages)]) == [skill_talk.FALLBACK]
