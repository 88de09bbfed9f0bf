"""Prompts: cache boundaries for templates that rewrite turns, and a middle to fill in."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.encoder import SECTION_CHARS_MAX, Encoder
from services.gateway.tokenizing.infill import Infill
from services.gateway.tokenizing.prompt import PREFIXES_MAX, InstructionPrefixes, Prompt
from tests.gateway import tiny_tokenizer
from tests.support.effort import cases
from tests.unit.gateway.tokenizing import chat_templates, small_tokenizers

OPENING_TOKENS_MAX = 24
"""Bound on the tokens that open an answer and may be rewritten with it, in these templates."""

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}

_texts = st.lists(
    st.sampled_from(["Hello", " there", "\n", "two  ", "<|im_end|>", "</think>", "漢", "x"]),
    min_size=1,
    max_size=12,
).map("".join)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, thought: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought or None}


def _tool_step(text: str, thought: str) -> list[dict[str, Any]]:
    call = {**_assistant("", thought), "tool_calls": [_CALL]}
    return [call, {"role": "tool", "content": text, "tool_call_id": "1"}]


@st.composite
def _conversations(draw: st.DrawFn, tool_steps_max: int) -> list[dict[str, Any]]:
    """Complete turns, then a user message, then tool calls with results."""
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 3))):
        messages += [_user(draw(_texts)), _assistant(draw(_texts), draw(_texts))]
    messages.append(_user(draw(_texts)))
    for _ in range(draw(st.integers(0, tool_steps_max))):
        messages += _tool_step(draw(_texts), draw(_texts) * 5)
    return messages


def _encode(template: str, messages: list[dict[str, Any]], tools: Any = None) -> Prompt:
    return chat_templates.tokenizer(template).encode_chat(messages, tools, {}, 1)


def _shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _nearest_boundary(prompt: Prompt, shared: int) -> int:
    return max((boundary for boundary in prompt.cache_boundaries if boundary <= shared), default=0)


@pytest.mark.parametrize("name", chat_templates.ALL)
@settings(max_examples=cases(12, 60))
@given(messages=_conversations(tool_steps_max=0), answer=_texts, has_tools=st.booleans())
def test_last_cache_boundary_is_where_prompt_of_next_turn_diverges(
    name: str, messages: list[dict[str, Any]], answer: str, has_tools: bool
) -> None:
    """The next turn shares all tokens up to the last boundary, and few more."""
    tools = _TOOLS if has_tools else None
    template = chat_templates.ALL[name]
    prompt = _encode(template, messages, tools)
    later = _encode(
        template, [*messages, _assistant(answer, "long thoughts"), _user("More")], tools
    )
    shared = _shared_tokens(prompt.ids, later.ids)
    assert prompt.cache_boundaries == sorted(set(prompt.cache_boundaries))
    assert prompt.cache_boundaries[-1] <= len(prompt.ids)
    assert shared - _nearest_boundary(prompt, shared) <= OPENING_TOKENS_MAX
    if not (name == "moves tools" and has_tools):
        # With tools this template's last boundary is for an answer with a tool call.
        assert prompt.cache_boundaries[-1] <= shared


@pytest.mark.parametrize("template", [chat_templates.STRIPS_THINKING, chat_templates.PLAIN_TURNS])
@settings(max_examples=cases(12, 60))
@given(messages=_conversations(tool_steps_max=3), text=_texts, thought=_texts)
def test_prompt_after_tool_call_has_boundaries_for_tool_and_user_turns(
    template: str, messages: list[dict[str, Any]], text: str, thought: str
) -> None:
    """One boundary fits further tool calls; one fits a user message, which removes reasoning."""
    prompt = _encode(template, messages, _TOOLS)
    called = _encode(template, [*messages, *_tool_step(text, thought)], _TOOLS)
    assert prompt.cache_boundaries[-1] <= _shared_tokens(prompt.ids, called.ids)
    assert len(prompt.ids) - prompt.cache_boundaries[-1] <= OPENING_TOKENS_MAX
    spoken = _encode(template, [*messages, _assistant(text, thought), _user("More")], _TOOLS)
    shared = _shared_tokens(prompt.ids, spoken.ids)
    assert shared - _nearest_boundary(prompt, shared) <= OPENING_TOKENS_MAX


@pytest.mark.parametrize("name", chat_templates.ALL)
@settings(max_examples=cases(10, 40))
@given(messages=_conversations(tool_steps_max=0))
def test_prompt_has_cache_boundary_before_last_user_message(
    name: str, messages: list[dict[str, Any]]
) -> None:
    """A client that edits its last message finds everything before it in the cache."""
    template = chat_templates.ALL[name]
    prompt = _encode(template, messages)
    edited = _encode(template, [*messages[:-1], _user("Ω" + messages[-1]["content"])])
    shared = _shared_tokens(prompt.ids, edited.ids)
    assert shared - _nearest_boundary(prompt, shared) <= 1


@pytest.mark.parametrize("name", [name for name in chat_templates.ALL if name != "takes turns"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_system_tokens_are_those_shared_by_conversations_with_equal_instructions(
    name: str, has_tools: bool
) -> None:
    """System prompt and tools count to the token, also when they are already known."""
    tools = _TOOLS if has_tools else None
    template = chat_templates.ALL[name]
    system = {"role": "system", "content": "Be <|im_end|> brief. " * 20}
    first = _encode(template, [system, _user("Alpha"), _assistant("x"), _user("y")], tools)
    other = _encode(template, [system, _user("Omega")], tools)
    shared = _shared_tokens(first.ids, other.ids)
    assert 20 < first.system_tokens <= shared
    assert shared - first.system_tokens <= 1
    assert _encode(template, [system, _user("Beta")], tools).system_tokens <= len(other.ids)


def test_prompt_without_system_prompt_or_tools_has_no_system_tokens() -> None:
    """A conversation without system prompt and tools has 0 system tokens."""
    assert _encode(chat_templates.PLAIN_TURNS, [_user("Hello")]).system_tokens == 0
    assert _encode(chat_templates.PLAIN_TURNS, [_user("Hello")], _TOOLS).system_tokens > 20


def test_other_cache_boundaries_remain_when_template_refuses_next_turn() -> None:
    """The template refuses the probe for the next turn; the other boundaries remain."""
    template = (
        "{%- if messages | length > 3 %}{{- raise_exception('too many messages') }}{%- endif %}"
        + chat_templates.PLAIN_TURNS
    )
    with pytest.raises(ApiError):
        _encode(template, [_user("a"), _assistant("b")] * 2)
    prompt = _encode(template, [_user("a"), _assistant("b"), _user("c")])
    assert prompt.cache_boundaries
    assert prompt.cache_boundaries[-1] <= len(prompt.ids)


def test_prompt_shorter_than_one_kv_block_has_no_cache_boundaries() -> None:
    """A prompt below one block, or without a cache, has no boundaries."""
    tokenizer = chat_templates.tokenizer(chat_templates.PLAIN_TURNS)
    messages = [{"role": "system", "content": "Be brief."}, _user("Hello")]
    length = len(tokenizer.encode_chat(messages, None, {}).ids)
    assert tokenizer.encode_chat(messages, None, {}, 0).cache_boundaries == []
    assert tokenizer.encode_chat(messages, None, {}, length + 1).cache_boundaries == []
    assert tokenizer.encode_chat(messages, None, {}, length).cache_boundaries != []


@pytest.mark.parametrize("has_special_text", [False, True])
def test_search_for_cache_boundaries_does_not_encode_long_prompt_again(
    monkeypatch: pytest.MonkeyPatch, has_special_text: bool
) -> None:
    """Comparing encodes only the text around the divergence, not the prompt again."""
    encoded: list[int] = []
    whole = Encoder.encode_rendered

    def counting(self: Encoder, text: str, mark: str, *, in_pieces: bool) -> list[int]:
        encoded.append(len(text))
        return whole(self, text, mark, in_pieces=in_pieces)

    monkeypatch.setattr(Encoder, "encode_rendered", counting)
    text = "one two three " * 20_000 + ("<|im_end|>" if has_special_text else "")
    system = {"role": "system", "content": text}
    prompt = _encode(chat_templates.PLAIN_TURNS, [system, _user(text)], _TOOLS)
    assert prompt.system_tokens > 20_000
    assert len(prompt.cache_boundaries) == 2
    assert sum(encoded) < 1_000


def test_long_prompt_section_without_special_tokens_has_no_cache_boundary() -> None:
    """Without special tokens a long section is not encoded a second time."""
    short, long = "a" * 100, "one two " * (SECTION_CHARS_MAX // 8)
    template = chat_templates.NO_SPECIAL_TOKENS
    assert len(_encode(template, [_user(short)]).cache_boundaries) == 2
    assert len(_encode(template, [_user(long)]).cache_boundaries) == 1


def test_instructions_are_rendered_once_for_prompts_that_begin_with_them() -> None:
    """Only a prompt that does not begin with the known instructions, or follows too many others,
    renders them again."""
    rendered: list[Any] = []

    def render(fields: Any, *, opens_answer: bool = True) -> str:
        rendered.append(fields)
        messages, tools = fields
        place = 0 if len(messages) < 4 else 1
        parts = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>" for one in messages]
        return "".join([*parts[:place], f"<|im_start|>{tools}<|im_end|>", *parts[place:]])

    encoder = Encoder(small_tokenizers.byte_level())
    known = InstructionPrefixes()

    def count(*messages: dict[str, Any]) -> int:
        conversation = encoder.encode_conversation([list(messages), _TOOLS], render)
        rendered.clear()
        return known.count_tokens(conversation, list(messages), _TOOLS, {}, render)

    first = count(_user("Alpha"))
    assert (first > 10, len(rendered)) == (True, 1)
    assert (count(_user("Omega")), len(rendered)) == (first, 0)
    moved = [_user("Alpha"), _assistant("b"), _user("c"), _assistant("d")]
    assert count(*moved) < first
    assert len(rendered) == 1
    for number in range(PREFIXES_MAX):
        count({"role": "system", "content": f"{number}"}, _user("Alpha"))
    assert (count(_user("Omega")), len(rendered)) == (first, 1)


FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "{0}PRE{1}SUF{2}"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "{0}PRE{1}SUF{2}"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "{0}PRE{1}SUF{2}"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "{0}PRE{1}SUF{2}"),  # noqa: RUF001
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "{0}PRE{1}SUF{2}"),
    "seed-coder": ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", "{1}SUF{0}PRE{2}"),
    "codestral": ("[PREFIX]", "[SUFFIX]", "", "{1}SUF{0}PRE"),
}
"""Markers as the families' own documents write them, and the layout of a whole prompt."""


def backend_with(*names: str) -> Tokenizer:
    """Return a small tokenizer with these added tokens."""
    return tiny_tokenizer.train_byte_level(["a b c"] * 3, 300, [name for name in names if name])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_has_layout_of_family(family: str) -> None:
    """Prefix and suffix stand behind their markers, in the order that the family was trained on."""
    *markers, layout = FAMILIES[family]
    backend = backend_with(*markers)
    infill = Infill.find(backend)
    assert infill is not None

    ids = infill.arrange([1], backend.encode("PRE").ids, backend.encode("SUF").ids)

    assert ids[0] == 1
    written = backend.decode(ids[1:], skip_special_tokens=False)
    assert written == layout.format(*markers)
    assert {backend.token_to_id(one) for one in markers if one} <= set(infill.stop_ids)


def test_completion_ends_with_text_and_padding_tokens_of_code_models() -> None:
    """The tokens that end a middle in code models are stop tokens."""
    backend = backend_with(*FAMILIES["qwen"][:3], "<|fim_pad|>", "<|file_sep|>")
    infill = Infill.find(backend)
    assert infill is not None

    ends = {backend.token_to_id(one) for one in ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>")}
    assert ends <= set(infill.stop_ids)


@pytest.mark.parametrize("names", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)])
def test_tokenizer_without_all_markers_cannot_fill_in(names: tuple[str, ...]) -> None:
    """Part of a family's markers is not enough."""
    assert Infill.find(backend_with(*names)) is None
