# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Turns of agents in templates that misplace, merge or drop parts of them: all stay in place."""

import re
from typing import Any

import pytest
import transformers

from services.gateway.conversation.conversation import Call, Conversation, ConversationMessage
from services.gateway.conversation.template import template_messages
from services.gateway.output.events import CallArguments, CallBegun, CallEnded, Reasoning, Text
from services.gateway.tokenizing.replay.meaning import digest_messages
from services.gateway.tokenizing.replay.recorder import TurnRecorder
from services.gateway.tokenizing.replay.turns import TurnMemory
from services.gateway.tokenizing.tokenizer import Tokenizer
from tests.unit.gateway.tokenizing import chat_templates, small_tokenizers

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
_OPENS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_ARGUMENTS = "{{- call.function.arguments | tojson }}"

_THINKING_PARTS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}"
    "{%- elif part.type == 'thinking' %}{{- '[THINK]' + part.thinking + '[/THINK]' }}"
    "{%- else %}{{- raise_exception('an unknown part') }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}" + _ARGUMENTS + "{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endfor %}" + _OPENS
)
"""As newer templates of Mistral."""
_PRINTED_PARTS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content if message.content is string else message.content | tojson }}"
    "{{- '<|im_end|>' }}{%- endfor %}" + _OPENS
)
"""As LFM2: content that is no text is written as JSON."""
_TEXT_BEHIND_RESULTS = (
    "{%- set ns = namespace(last='') %}"
    "{%- for message in messages %}{%- if message.role != 'tool' %}"
    "{%- if not (message.role == 'assistant' and ns.last == 'assistant') %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}{%- endif %}"
    "{%- set ns.last = message.role %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<|tool_call>call:' + call.function.name }}" + _ARGUMENTS + "{{- '<tool_call|>' }}"
    "{%- endfor %}"
    "{%- if message.tool_calls %}{%- for result in messages %}"
    "{%- if result.role == 'tool' and result.tool_call_id == message.tool_calls[0].id %}"
    "{{- '<response:' + result.name + ' ' + result.content + '>' }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{{- message.content | trim }}"
    "{%- if message.content or not message.tool_calls %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""As Gemma 4: results stand inside the turn of their calls, and its text behind them."""
_TEXT_IN_ANALYSIS = (
    "{%- set ns = namespace(called='') %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.tool_calls %}"
    "{%- if message.content and message.thinking %}"
    "{{- raise_exception('either content or thinking') }}{%- endif %}"
    "{%- if message.content or message.thinking %}"
    "{{- '<|channel|>analysis<|message|>' + (message.content or message.thinking) }}"
    "{{- '<|end|><|im_start|>assistant' }}{%- endif %}"
    "{%- set call = message.tool_calls[0] %}{%- set ns.called = call.function.name %}"
    "{{- ' to=functions.' + ns.called + '<|channel|>commentary json<|message|>' }}"
    + _ARGUMENTS
    + "{{- '<|call|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if not ns.called %}{{- raise_exception('no call before a result') }}{%- endif %}"
    "{{- '<|message|>' + message.content + '<|end|>' }}"
    "{%- elif message.role == 'assistant' %}{%- set ns.called = '' %}"
    "{{- '<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{%- else %}{{- '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"
).replace("<|im_start|>", "<|start|>")
"""As gpt-oss: a text beside a call is taken for analysis."""
_NO_TEXT_BESIDE_CALLS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}" + _ARGUMENTS + "{%- endfor %}"
    "{%- else %}{{- message.content }}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}" + _OPENS
)
"""As Mistral Small 3.2."""
_BARE_CALLS = _NO_TEXT_BESIDE_CALLS.replace(
    "'[TOOL_CALLS]' + call.function.name + '[ARGS]'",
    '\'{"name": "\' + call.function.name + \'", "parameters": \'',
).replace(_ARGUMENTS, _ARGUMENTS + "{{- '}' }}{#- <|start_header_id|> tools #}")
"""As Llama 3."""
_NO_CALLS = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}" + _OPENS
)
_HERMES = "{%- if tools %}{{- 'Call with <tool_call>: ' + (tools | tojson) }}{%- endif %}"
_GRANITE = "{%- if tools %}{{- 'Call with <|tool_call|>: ' + (tools | tojson) }}{%- endif %}"
_LFM2 = "{%- if tools %}{{- '<|tool_list_start|>' + (tools | tojson) }}{%- endif %}"
_CALLS_WITHOUT_CONTENT = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is none %}{%- for call in message.tool_calls %}"
    "{{- '<｜tool▁calls▁begin｜>' + call.function.name }}{%- endfor %}"
    "{%- else %}{{- message.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}" + _OPENS
)
"""As DeepSeek R1's distillations: calls are written only where the content is null."""


def _call(call_id: str, path: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"path": path}}
    return {"id": call_id, "type": "function", "function": function}


def _session(content: str = "", reasoning: str | None = None, calls: int = 1) -> list[Any]:
    """Return a conversation with two turns that call, each with text and reasoning."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for turn in ("1", "2"):
        called = [_call(f"call_{turn}{number}", f"{turn}{number}.py") for number in range(calls)]
        fields = {} if reasoning is None else {"reasoning_content": f"{reasoning} {turn}"}
        content_of_turn = f"{content} {turn}." if content else ""
        messages.append(
            {"role": "assistant", "content": content_of_turn, "tool_calls": called, **fields}
        )
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['id']}"}
            for call in called
        ]
    return messages


def _rendered(template: str, messages: list[Any]) -> str:
    tokenizer: Tokenizer = chat_templates.tokenizer(template)
    prompt = tokenizer.encode_chat(messages, _TOOLS, {})
    return tokenizer.decode_whole(list(prompt.ids))


def test_thoughts_become_parts_of_the_content_if_the_template_wants_them_there() -> None:
    """Thoughts of earlier turns stand before text and calls, also in turns without text."""
    spoken = _rendered(_THINKING_PARTS, _session("Reading", "A thought"))
    silent = _rendered(_THINKING_PARTS, _session("", "A thought"))

    assert "\n[THINK]A thought 1[/THINK]Reading 1.[TOOL_CALLS]look[ARGS]" in spoken
    assert "\n[THINK]A thought 2[/THINK]Reading 2.[TOOL_CALLS]look[ARGS]" in spoken
    assert "\n[THINK]A thought 2[/THINK][TOOL_CALLS]look[ARGS]" in silent


def test_content_stays_text_if_the_template_writes_parts_as_json() -> None:
    """A template that prints a list it does not know gets none."""
    text = _rendered(_PRINTED_PARTS, _session("Reading", "A thought"))

    assert "<|im_start|>assistant\nReading 1.<|im_end|>" in text


@pytest.mark.parametrize("reasoning", [None, "A thought"])
def test_text_beside_a_call_stands_before_it_if_the_template_writes_it_behind_results(
    reasoning: str | None,
) -> None:
    """The prompt ends as without the text, so the model goes on in its turn."""
    spoken = _rendered(_TEXT_BEHIND_RESULTS, _session("Reading", reasoning))
    silent = _rendered(_TEXT_BEHIND_RESULTS, _session("", reasoning))

    assert "assistant\nReading 1.<|tool_call>call:look" in spoken
    assert "<response:look result of call_10>Reading 2.<|tool_call>call:look" in spoken
    assert re.sub(r"Reading \d\.", "", spoken) == silent
    assert silent.endswith("<response:look result of call_20>")


@pytest.mark.parametrize("calls", [1, 2])
def test_text_beside_a_call_is_commentary_in_harmony(calls: int) -> None:
    """It is neither lost nor analysis, with and without thoughts, in a message of its own."""
    thoughtful = _rendered(_TEXT_IN_ANALYSIS, _session("Reading", "A thought", calls))
    spoken = _rendered(_TEXT_IN_ANALYSIS, _session("Reading", None, calls))

    said = "<|channel|>commentary<|message|>Reading {}.<|end|><|start|>assistant to=functions.look"
    for turn in (1, 2):
        thought = f"<|channel|>analysis<|message|>A thought {turn}<|end|><|start|>assistant"
        assert f"<|start|>assistant{thought}{said.format(turn)}" in thoughtful
        assert f"<|start|>assistant{said.format(turn)}" in spoken
    assert "analysis" not in spoken


def test_text_beside_a_call_is_written_if_the_template_drops_it() -> None:
    """It stands where the model wrote it, before the marker of the calls."""
    text = _rendered(_NO_TEXT_BESIDE_CALLS, _session("Reading", calls=2))

    assert "assistant\nReading 1.[TOOL_CALLS]look[ARGS]" in text
    assert "assistant\nReading 2.[TOOL_CALLS]look[ARGS]" in text


def test_text_before_a_bare_call_is_followed_by_the_marker_of_calls() -> None:
    """Behind a text, an object without a marker is no call: the model must not learn it."""
    text = _rendered(_BARE_CALLS, _session("Reading"))

    assert 'assistant\nReading 2.<|python_tag|>{"name": "look"' in text


def test_placed_text_with_special_tokens_and_braces_stays_as_it_is() -> None:
    """A client's text is inserted whole, and its special tokens are plain characters."""
    messages = _session("Reading")
    messages[1]["content"] = "<|im_end|> {{ 1 }} \\1 call:look"

    text = _rendered(_TEXT_BEHIND_RESULTS, messages)

    assert "assistant\n<|im_end|> {{ 1 }} \\1 call:look<|tool_call>call:look" in text
    tokenizer = chat_templates.tokenizer(_TEXT_BEHIND_RESULTS)
    ids = list(tokenizer.encode_chat(messages, _TOOLS, {}).ids)
    assert ids.count(tokenizer.added_tokens()["<|im_end|>"]) == 1


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (_HERMES + _NO_CALLS, '<tool_call>\n{"name": "look", "arguments": {"path": "10.py"}}'),
        (
            _GRANITE + _NO_CALLS,
            '<|tool_call|>[{"name": "look", "arguments": {"path": "10.py"}}]<|im_end|>',
        ),
        (_LFM2 + _NO_CALLS, '<|tool_call_start|>[look(path="10.py")]<|tool_call_end|>'),
        (
            _CALLS_WITHOUT_CONTENT,
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
                '{"path": "10.py"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
        ),
    ],
    ids=["hermes", "granite", "lfm2", "deepseek"],
)
def test_calls_that_a_template_drops_stand_in_the_content_in_the_models_format(
    template: str, call: str
) -> None:
    """The model sees its calls, before their results and behind its text."""
    silent = _rendered(template, _session(calls=2))
    spoken = _rendered(template, _session("Reading"))

    assert "<|im_start|>assistant\n" + call.partition("look")[0] in silent
    assert silent.count("11.py") == silent.count("21.py") == 1
    assert f"<|im_start|>assistant\nReading 1.\n{call}" in spoken
    assert spoken.index(call) < spoken.index("result of call_10")


def test_calls_stay_out_of_the_content_if_their_format_is_not_known() -> None:
    """Nothing is invented for a model that has no tools."""
    text = _rendered(_NO_CALLS, _session("Reading"))

    assert "<|im_start|>assistant\nReading 1.<|im_end|>" in text
    assert "10.py" not in text


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (
            _THINKING_PARTS,
            '[THINK]A thought 1[/THINK]Reading 1.[TOOL_CALLS]look[ARGS]{"path":"10.py"}',
        ),
        (
            _TEXT_BEHIND_RESULTS.replace("<response:", "<|im_end|><response:"),
            'Reading 1.\n<|tool_call>call:look{"path":"10.py"}<tool_call|>',
        ),
        (
            _TEXT_IN_ANALYSIS.replace("<|call|>", "<|im_end|>"),
            (
                "<|channel|>analysis<|message|>A thought 1<|end|><|start|>assistant"
                "<|channel|>commentary<|message|>Reading 1.<|end|><|start|>assistant"
                "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
                '{"path":"10.py"}'
            ),
        ),
        (
            _HERMES + _NO_CALLS,
            'Reading 1.\n\n<tool_call>{"name":"look", "arguments":{"path":"10.py"}}</tool_call>',
        ),
    ],
    ids=["parts", "behind results", "harmony", "dropped"],
)
def test_replayed_turn_has_the_tokens_that_the_model_wrote(template: str, written: str) -> None:
    """The next prompt begins with all tokens so far, also if the template spells them otherwise."""
    backend = small_tokenizers.byte_level()
    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    inner.chat_template = template
    tokenizer = Tokenizer(inner, {"eos_token_id": backend.token_to_id("<|im_end|>")}, {})
    call = Call("call_10", "look", {"path": "10.py"})
    session = [
        ConversationMessage("user", "go"),
        ConversationMessage("assistant", "Reading 1.", calls=[call]),
        ConversationMessage("tool", "done", answers="call_10"),
    ]
    digests = digest_messages(session, [])
    asked = tokenizer.encode_chat(template_messages(Conversation(session[:1])), _TOOLS, {}, 8)
    assert asked.place is not None
    memory, stop_ids = TurnMemory(1_000_000), frozenset(tokenizer.stop_ids)
    recorder = TurnRecorder(
        memory, "one", digests[0], asked.place, tokenizer.decode_whole, stop_ids, {}
    )
    for event in (
        *(Reasoning("A thought 1"), Text("Reading 1."), CallBegun(0, "call_10", "look")),
        *(CallArguments('{"path":"10.py"}'), CallEnded()),
    ):
        recorder.add(event)
    # Each character alone: the model may cut text otherwise than its tokenizer does.
    ids = [token for char in written for token in tokenizer.encode_text(char)]
    recorder.finish([*ids, *stop_ids])

    replay = memory.recall("one", session, digests)
    messages = template_messages(Conversation(replay.messages))
    replayed = tokenizer.encode_chat(messages, _TOOLS, {}, 8, turns=replay.turns)

    known = [*asked.ids, *ids, *stop_ids]
    assert list(replayed.ids[: len(known)]) == known
