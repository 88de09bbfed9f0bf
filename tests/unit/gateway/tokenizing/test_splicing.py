"""Splicing of turns: the model's own tokens in place of the text that a template gives for them."""

import dataclasses
import functools
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.conversation.conversation import (
    Call,
    Conversation,
    ConversationMessage,
    Tool,
)
from services.gateway.conversation.template import template_messages
from services.gateway.http.request_body import decode_arguments
from services.gateway.output.events import CallArguments, CallBegun, CallEnded, Reasoning, Text
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.replay.meaning import argument_defaults, digest_messages
from services.gateway.tokenizing.replay.recorder import TurnRecorder
from services.gateway.tokenizing.replay.turns import TurnMemory
from services.gateway.tokenizing.tokenizer import Tokenizer
from tests.support.effort import cases
from tests.unit.gateway.tokenizing import chat_templates, small_tokenizers

_END = "<|im_end|>"
_KEEPS_THINKING = chat_templates.STRIPS_THINKING.replace(" and loop.index0 > ns.last", "")
_THOUGHT = "I need the file."
_TEXT = "Reading it."
_ARGUMENTS = '{"path": "a.py",  "line":1.0, "deep": {"b": [1, "ü"], "a": null}}'
_CALL = f'<tool_call>{{"name": "read",\n"arguments": {_ARGUMENTS}}}</tool_call>'
_DEFAULTS = {"all": {"type": "boolean", "default": False}, "count": {"default": 2.0}}
_READ = Tool("read", parameters={"type": "object", "properties": _DEFAULTS})
_WRITTEN = f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}\n{_CALL}"


@functools.cache
def _tokenizer(template: str) -> Tokenizer:
    backend = small_tokenizers.byte_level()
    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    inner.chat_template = template
    return Tokenizer(inner, {"eos_token_id": backend.token_to_id(_END)}, {})


class _Session:
    """A conversation with a model whose answers are given as text and encoded token by token."""

    def __init__(self, template: str = _KEEPS_THINKING, first: str = "Read a.py.") -> None:
        self.tokenizer = _tokenizer(template)
        self.memory = TurnMemory(1_000_000)
        self.messages = [ConversationMessage("user", first)]

    @property
    def digests(self) -> list[bytes]:
        """Those of the messages."""
        return digest_messages(self.messages, [_READ])

    def encode(self, tenant: str = "one", *, is_known: bool = True) -> Prompt:
        """Return the prompt of the messages, with or without the memory of turns."""
        memory = self.memory if is_known else TurnMemory(0)
        replay = memory.recall(tenant, self.messages, self.digests)
        messages = template_messages(Conversation(replay.messages))
        return self.tokenizer.encode_chat(messages, None, {}, 8, turns=replay.turns)

    def answer(
        self,
        written: str = _WRITTEN,
        text: str = _TEXT,
        reasoning: str = _THOUGHT,
        arguments: str | None = _ARGUMENTS,
        *,
        is_stopped: bool = True,
    ) -> list[int]:
        """Let the model write a text; return the ids of the prompt and of the text."""
        prompt = self.encode()
        assert prompt.place is not None
        # Each character alone: the model may cut text otherwise than its tokenizer does.
        ids = [token for char in written for token in self.tokenizer.encode_text(char)]
        ids += self.tokenizer.stop_ids if is_stopped else []
        key = self.digests[-1]
        recorder = TurnRecorder(
            self.memory,
            "one",
            key,
            prompt.place,
            self.tokenizer.decode_whole,
            frozenset(self.tokenizer.stop_ids),
            argument_defaults([_READ]),
        )
        recorder.add(Reasoning(reasoning))
        recorder.add(Text(text))
        if arguments is not None:
            recorder.add(CallBegun(0, "c1", "read"))
            recorder.add(CallArguments(arguments[:7]))
            recorder.add(CallArguments(arguments[7:]))
            recorder.add(CallEnded())
        recorder.finish(ids)
        return [*prompt.ids, *ids]


def _replayed(**changes: Any) -> ConversationMessage:
    """Return the turn as a client sends it back: other spelling of the call, no reasoning."""
    arguments = {"deep": {"a": None, "b": [1, "ü"]}, "line": 1, "path": "a.py"}
    turn = ConversationMessage("assistant", _TEXT, calls=[Call("c1", "read", arguments)])
    return dataclasses.replace(turn, **changes)


def _result(call_id: str = "c1") -> ConversationMessage:
    return ConversationMessage("tool", "def main(): <|im_end|>", answers=call_id)


def _shared(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reasoning": _THOUGHT},
        {"reasoning": f"\n{_THOUGHT}\n"},
        {"reasoning": ""},
        {"text": f"{_TEXT}\n"},
    ],
)
@pytest.mark.parametrize("first", ["Read a.py.", "Read <|im_start|>a.py<|im_end|>."])
def test_replayed_turn_continues_the_prompt_with_the_models_own_tokens(
    first: str, changes: dict[str, Any]
) -> None:
    """The next prompt begins with all tokens so far, in each spelling of the turn.

    What follows the turn is encoded as the template writes it.
    """
    session = _Session(first=first)
    known = session.answer()
    session.messages += [_replayed(**changes), _result()]
    prompt = session.encode()
    assert list(prompt.ids[: len(known)]) == known
    tail = session.tokenizer.decode_whole(list(prompt.ids[len(known) :]))
    assert tail == f"\n<|im_start|>tool\ndef main(): {_END}{_END}\n<|im_start|>assistant\n"
    plain = list(session.encode(is_known=False).ids)
    assert _shared(plain, known) < len(known) - len(_ARGUMENTS)
    # The template's own special tokens after the turn are the same, and the client's are text.
    assert list(prompt.ids)[-12:] == plain[-12:]


@pytest.mark.parametrize(
    ("added", "is_same"),
    [
        ({"all": False}, True),
        ({"all": False, "count": 2}, True),
        ({"all": True}, False),
        ({"all": 0}, False),
        ({"some": False}, False),
    ],
)
def test_client_may_add_the_defaults_of_a_tool_to_the_models_call(
    added: dict[str, Any], is_same: bool
) -> None:
    """An argument with the default of the tool's schema, as Claude Code adds it, says nothing new;
    any other does."""
    session = _Session()
    known = session.answer()
    [call] = _replayed().calls
    session.messages += [
        _replayed(calls=[dataclasses.replace(call, arguments={**call.arguments, **added})]),
        _result(),
    ]
    assert (list(session.encode().ids[: len(known)]) == known) is is_same


def test_ids_of_calls_may_differ_when_the_template_does_not_write_them() -> None:
    """A client that renames calls and the results that belong to them changes no text."""
    session = _Session()
    known = session.answer()
    call = dataclasses.replace(_replayed().calls[0], call_id="x9")
    session.messages += [_replayed(calls=[call]), _result("x9")]
    assert list(session.encode().ids[: len(known)]) == known


def test_ids_of_calls_must_be_equal_when_the_template_writes_them() -> None:
    """With other ids the turn is rendered with the client's."""
    template = _KEEPS_THINKING.replace("'<tool_call>' +", "'<tool_call>' + call.id +")
    for call_id in ("c1", "x9"):
        session = _Session(template)
        known = session.answer(_WRITTEN.replace("<tool_call>", "<tool_call>c1"))
        call = dataclasses.replace(_replayed().calls[0], call_id=call_id)
        session.messages += [_replayed(calls=[call]), _result(call_id)]
        ids = list(session.encode().ids)
        assert (ids[: len(known)] == known) == (call_id == "c1")
        assert f"<tool_call>{call_id}" in session.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "Reading."},
        {"text": ""},
        {"reasoning": "Something else."},
        {"calls": []},
        {"calls": [Call("c1", "write", _replayed().calls[0].arguments)]},
        {"calls": [Call("c1", "read", {**_replayed().calls[0].arguments, "line": 2})]},
        {"calls": [Call("c1", "read", {**_replayed().calls[0].arguments, "line": "1"})]},
        {"calls": [Call("c1", "read", {**_replayed().calls[0].arguments, "line": True})]},
        {"calls": [*_replayed().calls, *_replayed().calls]},
        {"author": "someone"},
    ],
)
def test_turn_that_differs_in_meaning_is_rendered_as_the_client_sent_it(
    changes: dict[str, Any],
) -> None:
    """Another text, reasoning, name, value or number of calls is the client's own turn."""
    session = _Session()
    session.answer()
    session.messages += [_replayed(**changes), ConversationMessage("user", "Go on.")]
    assert session.encode().ids == session.encode(is_known=False).ids


def test_turn_of_another_tenant_or_another_conversation_is_not_used() -> None:
    """Only the tenant that got the turn, after the same messages, gets its tokens."""
    session = _Session()
    session.answer()
    session.messages += [_replayed(), _result()]
    plain = session.encode(is_known=False).ids
    assert session.encode(tenant="two").ids == plain != session.encode().ids
    session.messages[0] = ConversationMessage("user", "Read b.py.")
    assert session.encode().ids == session.encode(is_known=False).ids


def test_reasoning_stays_away_where_the_template_removes_it() -> None:
    """After a user's message Qwen3's template drops reasoning, also when the turn is known."""
    session = _Session(chat_templates.STRIPS_THINKING)
    known = session.answer()
    session.messages += [_replayed(), _result()]
    prompt = session.encode()
    assert list(prompt.ids[: len(known)]) == known
    session.messages.append(ConversationMessage("user", "And now?"))
    assert _THOUGHT not in session.tokenizer.decode(list(session.encode().ids))


def test_turns_of_a_long_session_are_all_spliced_in_order() -> None:
    """Twenty turns, also equal ones and ones without calls: each prompt begins with the last."""
    session = _Session()
    for number in range(20):
        if number % 4 == 3:
            known = session.answer("Done.", "Done.", "", None)
            session.messages += [
                ConversationMessage("assistant", "Done. "),
                ConversationMessage("user", "Again."),
            ]
        else:
            known = session.answer()
            session.messages += [_replayed(), _result()]
        assert list(session.encode().ids[: len(known)]) == known


def test_turn_without_an_end_token_is_spliced_before_the_template_ends_it() -> None:
    """A turn that ended at its longest length is followed by the template's end of a turn."""
    session = _Session()
    known = session.answer("One two", "One two", "", None, is_stopped=False)
    session.messages += [
        ConversationMessage("assistant", "One two"),
        ConversationMessage("user", "Go on."),
    ]
    ids = list(session.encode().ids)
    assert ids[: len(known)] == known
    assert session.tokenizer.decode_whole(ids[len(known) :]).startswith(f"{_END}\n<|im_start|>user")


_OPENING_TOKENS_MAX = 12
"""Tokens that open the answer, which the cache's last boundary leaves out."""
_PIECES = ["a", "b", " ", "\n", "漢", "<|im_end|>", "<|im_start|>", "{}", '"']
_written = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)


@settings(max_examples=cases(60, 400))
@given(answers=st.lists(_written, min_size=1, max_size=4), last=_written)
def test_spliced_prompt_has_the_text_and_the_boundaries_of_the_template(
    answers: list[str], last: str
) -> None:
    """For any answers the prompt decodes to the rendered text, apart from white space in turns.

    Its cache boundaries are those lengths that it shares with later prompts, or less.
    """
    session = _Session(chat_templates.PLAIN_TURNS)
    for answer in answers:
        session.answer(answer, answer, "", None)
        session.messages += [
            ConversationMessage("assistant", answer.strip()),
            ConversationMessage("user", "Go on."),
        ]
    session.messages[-1] = ConversationMessage("user", last)
    prompt = session.encode()
    plain = session.encode(is_known=False)
    decode = session.tokenizer.decode_whole
    assert "".join(decode(list(prompt.ids)).split()) == "".join(decode(list(plain.ids)).split())
    answered = [
        *session.messages,
        ConversationMessage("assistant", "x"),
        ConversationMessage("user", "y"),
    ]
    session.messages = answered
    later = session.encode()
    assert prompt.cache_boundaries[-1] <= _shared(prompt.ids, later.ids)
    assert len(prompt.ids) - prompt.cache_boundaries[-1] <= _OPENING_TOKENS_MAX


def test_end_of_a_turn_decodes_no_more_than_its_last_token() -> None:
    """It is the event loop's work; the text is decoded when the turn comes back, in a thread."""
    session = _Session()
    place = session.encode().place
    assert place is not None
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return session.tokenizer.decode_whole(tokens)

    stop_ids = frozenset(session.tokenizer.stop_ids)
    recorder = TurnRecorder(session.memory, "one", session.digests[-1], place, decode, stop_ids, {})
    recorder.add(Text(_TEXT))
    text_ids = session.tokenizer.encode_text(_TEXT)
    recorder.finish([*text_ids, *session.tokenizer.stop_ids])
    assert decoded == [1]
    [turn] = session.memory._turns["one"].values()
    assert turn.written(decode) == _TEXT
    assert decoded == [1, len(text_ids)]


def test_memory_of_turns_is_bounded_in_bytes_and_the_largest_tenant_loses_first() -> None:
    """A tenant with many turns does not push out those of another."""
    session = _Session()
    session.answer()
    [turn] = session.memory._turns["one"].values()
    memory = TurnMemory(10 * turn.size_bytes)
    memory.remember("small", b"key", turn)
    for number in range(100):
        memory.remember("large", b"%d" % number, turn)
        assert memory.size_bytes <= 10 * turn.size_bytes
    assert memory._find("small", b"key") is turn
    assert memory._find("large", b"99") is turn
    assert memory._find("large", b"90") is None
    memory.remember("large", b"99", turn)
    assert memory.size_bytes == 10 * turn.size_bytes
    memory.remember("third", b"key", dataclasses.replace(turn, text="x" * 100_000))
    assert memory._find("third", b"key") is None


@pytest.mark.parametrize(
    "arguments",
    ['{"line": NaN}', '{"line": 1e999}', r'{"path": "\ud800"}', '{"path": "a"', "[1]"],
    ids=["not a number", "infinity", "half a pair", "cut off", "list"],
)
def test_arguments_that_are_no_json_object_are_spliced_as_the_text_that_clients_send_back(
    arguments: str,
) -> None:
    """What the model wrote and what a client sends back is read by one rule."""
    written = f"<tool_call>{arguments}</tool_call>"
    session = _Session()
    session.answer(written, "", "", arguments)
    sent = Call("c1", "read", decode_arguments(arguments, "arguments"))
    session.messages += [ConversationMessage("assistant", calls=[sent]), _result()]
    assert session.memory.find_missing("one", session.messages, session.digests) == []


def test_turn_with_deeply_nested_arguments_is_not_remembered() -> None:
    """The completion ends without an error at every depth."""
    session = _Session()
    for depth in (100, 500, 900, 5_000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        session.answer(arguments=arguments)
    assert session.memory.size_bytes < 4 * len(_WRITTEN) + 100_000


def test_missing_turns_are_those_that_are_neither_in_memory_nor_known_to_be_absent() -> None:
    """A turn of another server is asked for once."""
    session = _Session()
    session.answer()
    session.messages += [
        _replayed(),
        _result(),
        ConversationMessage("assistant", "x"),
        ConversationMessage("user", "y"),
    ]
    [missing] = session.memory.find_missing("one", session.messages, session.digests)
    assert len(session.memory.find_missing("two", session.messages, session.digests)) == 2
    session.memory.add_stored("one", {missing: None})
    assert session.memory.find_missing("one", session.messages, session.digests) == []
    assert len(session.memory.find_missing("two", session.messages, session.digests)) == 2
