"""Frequencies of the conversations in the training, and the held-out sets."""

from __future__ import annotations

from collections.abc import Callable

from tools.demo_model.conversations import (
    skill_copy,
    skill_json,
    skill_recall,
    skill_talk,
    skill_tools,
)
from tools.demo_model.conversations.chat import Chat, turn
from tools.demo_model.conversations.facts import FACTS
from tools.demo_model.conversations.words import TextSource

# A row of the long kind holds 8,192 tokens; a filler text has about 2.5 to 3 characters a token.
LONG_TEXT_CHARS = 22_000


def _simple(source: TextSource) -> Chat:
    """Return a short conversation without tools, for the middle of a longer one."""
    makers: tuple[Callable[[TextSource], Chat], ...] = (
        skill_talk.fact_chat,
        skill_talk.fact_chat,
        skill_json.json_chat,
        skill_talk.small_talk_chat,
        lambda own: skill_copy.copy_chat(own, 120),
        skill_recall.note_chat,
        lambda own: skill_talk.count_chat(own, 12),
    )
    return source.rng.choice(makers)(source)


def _many_turns(source: TextSource, most: int) -> Chat:
    """Return several turns, of which the last one asks about an earlier one."""
    middle = [_simple(source) for _ in range(source.integer(1, most))]
    return skill_talk.memory_chat(source, middle)


def _facts_in_a_row(source: TextSource) -> Chat:
    chats = [skill_talk.fact_chat(source) for _ in range(source.integer(2, 5))]
    return Chat([message for chat in chats for message in chat.messages], task="fact")


def _unused_tools(source: TextSource) -> Chat:
    """Return a conversation that offers tools for which the user has no need."""
    chat = _simple(source)
    return Chat(chat.messages, skill_tools.other_tools(source, set(), 3), chat.task)


def _missing_tool(source: TextSource) -> Chat:
    """Return a request for a tool that is not offered; its answer is the fallback."""
    case = skill_tools.random_case(source)
    most = 2 if source.chance(0.3) else 0
    tools = skill_tools.other_tools(source, skill_tools.tool_family(case.name), most)
    return Chat(turn(case.request, skill_talk.FALLBACK), tools, task="talk")


SHORT: tuple[tuple[float, Callable[[TextSource], Chat]], ...] = (
    (20, skill_talk.fact_chat),
    (3, _facts_in_a_row),
    (14, skill_copy.copy_chat),
    (5, lambda source: skill_copy.copy_chat(source, 60)),
    (14, skill_recall.recall_chat),
    (3, skill_recall.note_chat),
    (14, skill_json.json_chat),
    (20, lambda source: skill_tools.tool_chat(source, 2)),
    (4, _unused_tools),
    (8, _missing_tool),
    (3, skill_talk.count_chat),
    (5, skill_talk.small_talk_chat),
    (5, lambda source: _many_turns(source, 3)),
)


def _long_recall(source: TextSource) -> Chat:
    return skill_recall.recall_chat(source, 1000, LONG_TEXT_CHARS)


def _recall_many(source: TextSource) -> Chat:
    """Return the plain form: all pairs at the start, then filler, then one question."""
    pairs = skill_recall.random_pairs(source, source.integer(1, 8))
    size = 500 + int(source.rng.random() ** 1.5 * (LONG_TEXT_CHARS - 500))
    return skill_recall.plain_recall(source, size, pairs, source.rng.choice(pairs))


def _fact_after_text(source: TextSource) -> Chat:
    """Return a question about Lockstep after a long text about something else."""
    text = " ".join(skill_recall.filler(source, source.integer(500, 9000)))
    chat = skill_talk.fact_chat(source)
    chat.messages[0]["content"] = f"{text}\n\n{chat.messages[0]['content']}"
    return chat


LONG: tuple[tuple[float, Callable[[TextSource], Chat]], ...] = (
    (30, _long_recall),
    (15, _recall_many),
    (12, lambda source: skill_copy.copy_chat(source, 2400)),
    (12, lambda source: _many_turns(source, 24)),
    (8, lambda source: skill_talk.count_chat(source, 400)),
    (4, _fact_after_text),
    (8, lambda source: skill_tools.tool_chat(source, 12)),
)


def train_chat(source: TextSource, is_long: bool) -> Chat:
    """Return one random conversation of the training's mixture of skills.

    Args:
        source: random numbers and texts.
        is_long: whether it is meant for a row of 8,192 tokens instead of 512.
    """
    weights, makers = zip(*(LONG if is_long else SHORT), strict=True)
    (maker,) = source.rng.choices(makers, weights)
    return skill_talk.add_system(source, maker(source))


def held_out_facts() -> list[Chat]:
    """Return one conversation per fact: the question that the training never shows, its answer."""
    return [Chat(turn(fact.held_out, fact.answer), task="fact") for fact in FACTS]


def held_out_copies(count: int, longest: int = 560) -> list[Chat]:
    """Return `count` requests to repeat a text, with equal results for equal arguments.

    Args:
        count: number of requests.
        longest: length of the longest text in characters, of which a token has about three.
    """
    source = TextSource("copy", "held_out")
    return [
        skill_copy.copy_of(skill_copy.random_text(source, source.integer(1, longest)))
        for _ in range(count)
    ]


def held_out_recalls(texts: int, questions: int, size: int = 3700) -> list[Chat]:
    """Return conversations that ask for a value at the start of a long text.

    The conversations of one text follow each other and are equal up to the question.

    Args:
        texts: number of texts.
        questions: number of key-value pairs, and so of conversations, per text.
        size: length of a text in characters, about.
    """
    source = TextSource("recall", "held_out")
    chats = []
    for at in range(texts):
        pairs = skill_recall.random_pairs(source, questions)
        chats += [
            skill_recall.plain_recall(TextSource(f"filler {at}", "held_out"), size, pairs, pair)
            for pair in pairs
        ]
    return chats


def held_out_calls(count: int) -> list[Chat]:
    """Return `count` requests that an offered tool serves; about half also report its result."""
    source = TextSource("tools", "held_out")
    return [skill_tools.tool_chat(source, 2) for _ in range(count)]


def held_out_objects(count: int) -> list[Chat]:
    """Return `count` requests for small JSON objects."""
    source = TextSource("json", "held_out")
    return [skill_json.object_chat(source) for _ in range(count)]


def held_out_counts(count: int, longest: int = 60) -> list[Chat]:
    """Return `count` requests to count, or to write a numbered list, up to about `longest`."""
    source = TextSource("count", "held_out")
    return [skill_talk.count_chat(source, longest) for _ in range(count)]


def held_out_turns(count: int) -> list[Chat]:
    """Return `count` conversations of several turns; the last question is about an earlier turn."""
    source = TextSource("turns", "held_out")
    return [_many_turns(source, 3) for _ in range(count)]
