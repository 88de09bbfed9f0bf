"""Trying of a chat template, to find its demands. Owns the conversations that are tried.

No model is known by name: a small conversation is rendered in several spellings at the start.
"""

import dataclasses
import itertools
import re
from typing import Any, Protocol

from services.gateway.output.calls.call_format import CallFormat
from services.gateway.output.families import TOOL_FORMATS
from services.gateway.output.harmony import Harmony
from services.gateway.tokenizing.template_needs.needs import TemplateNeeds
from services.gateway.tokenizing.template_needs.single_calls import Messages
from services.gateway.tokenizing.template_needs.text_place import TextPlace


class TryRender(Protocol):
    """Renderer of messages and tools."""

    def __call__(
        self, messages: Messages, tools: list[dict[str, Any]] | None, **arguments: Any
    ) -> str | None:
        """Return the text, None if the template refuses the messages.

        Args:
            messages: the messages.
            tools: the tools.
            arguments: further arguments of the template, by name.
        """
        ...


_USER = {"role": "user", "content": "first"}
_ANSWER = {"role": "assistant", "content": "second"}
_EMPTY_TURN = {"role": "assistant", "content": ""}
_LATE = "late instruction"
_KEY, _THOUGHT, _SPOKEN = "probe_key", "probe thought", "spoken words"
_NAME = "probe"
_VALUES = ("probe value", "probe other")
_RESULT = "probe result"
_OPEN_MARKER = re.compile(r"[<\[][^\s>\]]*\Z")
"""Beginning of a marker, where two markers with one beginning are compared."""
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "Probe."}},
            "required": [],
        },
    },
}
_KEEPS_REASONING = (
    {"preserve_thinking": True},
    {"clear_thinking": False},
    {"drop_thinking": False},
    {"truncate_history_thinking": False},
)
"""Template arguments of several families that keep the reasoning of earlier turns."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class _RefusedError(Exception):
    """The template refuses the messages that were tried."""


def find_needs(render: TryRender, tool_format: str = "off") -> TemplateNeeds:
    """Return what a template demands.

    Args:
        render: renders messages with the template.
        tool_format: name of the format of the model's calls, if it is known.
    """
    if render([_USER], None) is None:
        return TemplateNeeds()
    system = {"role": "system", "content": "start"}
    has_system = render([system, _USER], None) is not None
    late = [_USER, _ANSWER, {"role": "system", "content": _LATE}, _USER]
    text = render([system, *late] if has_system else late, None) or ""
    has_late_system = text.find(_LATE) > text.find(_ANSWER["content"])
    needs = TemplateNeeds(
        joins_neighbours=render([_USER, _USER], None) is None,
        has_system=has_system,
        has_late_system=has_late_system,
    )
    if render(needs.adapt([_USER, _EMPTY_TURN, _USER]), None) is None:
        needs = dataclasses.replace(needs, has_empty_turns=False)
    form = TOOL_FORMATS.get(tool_format)
    needs = _with_call_spelling(needs, render, form if isinstance(form, CallFormat) else None)
    needs = _with_several_calls(needs, render)
    needs = _with_reasoning(needs, render)
    needs = _with_text_place(needs, render, form)
    return _with_texts_after_results(needs, render)


def _accepts(render: TryRender, messages: Messages, *texts: str) -> bool:
    """Return whether a template accepts messages and writes these texts of them."""
    found = render(messages, [_TOOL])
    return found is not None and all(text in found for text in texts)


def _written(
    needs: TemplateNeeds, render: TryRender, messages: Messages, **arguments: Any
) -> str | None:
    """Return messages as a template writes them with these needs met, None if it refuses them."""

    def write(adapted: Messages) -> str:
        text = render(adapted, [_TOOL], **arguments)
        if text is None:
            raise _RefusedError
        return text

    try:
        return needs.render(messages, write)
    except _RefusedError:
        return None


def _with_call_spelling(
    needs: TemplateNeeds, render: TryRender, call_format: CallFormat | None
) -> TemplateNeeds:
    """Add how calls must be spelled; without a spelling that the template writes, nothing."""
    printed = f"'{_KEY}'"
    tools_printed = (render(needs.adapt([_USER]), [_TOOL]) or "").count(printed)
    for has_text_arguments, has_short_ids in itertools.product((False, True), repeat=2):
        tried = dataclasses.replace(
            needs,
            has_text_arguments=has_text_arguments,
            has_short_ids=has_short_ids,
        )
        text = render(tried.adapt(_conversation()), [_TOOL])
        # An object that is written as Python's text of it is no JSON.
        if text is not None and _VALUES[0] in text and text.count(printed) == tools_printed:
            return tried
    tried = dataclasses.replace(needs, call_format=call_format)
    return tried if _accepts(render, tried.adapt(_conversation()), *_VALUES[:1]) else needs


def _with_several_calls(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    """Add whether calls must stand in messages of their own, if that helps."""
    turns = _conversation(calls=len(_VALUES))
    if _accepts(render, needs.adapt(turns), *_VALUES):
        return needs
    tried = dataclasses.replace(needs, has_one_call=True)
    return tried if _accepts(render, tried.adapt(turns), *_VALUES) else needs


def _with_texts_after_results(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    """Add the roles that must not follow a call's result, if joining them to it helps."""
    for role in ("user", "system"):
        turns = [*_conversation(), {"role": role, "content": _LATE}, _ANSWER, _USER]
        if _accepts(render, needs.adapt(turns), _RESULT, _LATE):
            continue
        tried = dataclasses.replace(needs, joined_to_results=needs.joined_to_results | {role})
        if _accepts(render, tried.adapt(turns), _RESULT, _LATE):
            needs = tried
    return needs


def _with_reasoning(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    for key in _REASONING_KEYS:
        tried = dataclasses.replace(needs, reasoning_key=key)
        if _accepts(render, tried.adapt(_conversation(_THOUGHT)), _THOUGHT):
            spoken = _conversation(_THOUGHT, content=_SPOKEN)
            refused = not _accepts(render, tried.adapt(spoken))
            return dataclasses.replace(
                tried, has_one_text=refused, agent_arguments=_agent_arguments(tried, render)
            )
    tried = dataclasses.replace(needs, has_thinking_parts=True)
    text = render(tried.adapt(_conversation(_THOUGHT, content=_SPOKEN)), [_TOOL]) or ""
    # A template that knows no parts may write the list itself.
    is_known = -1 < text.find(_THOUGHT) < text.find(_SPOKEN)
    if is_known and not any(f"{quote}{_THOUGHT}{quote}" in text for quote in "\"'"):
        return dataclasses.replace(tried, agent_arguments=_agent_arguments(tried, render))
    return needs


def _with_text_place(
    needs: TemplateNeeds, render: TryRender, form: CallFormat | Harmony | None
) -> TemplateNeeds:
    """Add where a text beside a call belongs, if the template writes it elsewhere."""
    if form is None or _has_text_in_place(needs, render):
        return needs
    header, is_plain = _call_header(needs, render)
    if not header or not (is_plain or form.text_opening):
        # Texts of answers stand between markers, and which ones before calls is not known.
        return needs
    place = TextPlace(header, form.text_opening, form.text_closing)
    tried = dataclasses.replace(needs, text_place=place)
    return tried if _has_text_in_place(tried, render) else needs


def _has_text_in_place(needs: TemplateNeeds, render: TryRender) -> bool:
    """Return whether a text stands before the call beside it, and changes nothing behind it."""
    bare, spoken, thought = (
        _written(needs, render, turns, add_generation_prompt=True)
        for turns in (
            _conversation(),
            _conversation(content=_SPOKEN),
            _conversation(reasoning=_SPOKEN),
        )
    )
    if bare is None or _VALUES[0] not in bare or _RESULT not in bare:
        # No calls are written in any way, so there is no place beside them.
        return True
    if spoken is None or spoken == thought:
        return False
    in_order = -1 < spoken.find(_SPOKEN) < spoken.find(_VALUES[0]) < spoken.find(_RESULT)
    return in_order and spoken.rpartition(_RESULT)[2] == bare.rpartition(_RESULT)[2]


def _call_header(needs: TemplateNeeds, render: TryRender) -> tuple[str, bool]:
    """Return what a template writes between the opening of a turn and the name of a call.

    Returns:
        The text, "" if it is not found; and whether an answer stands right after the opening.
    """
    asked = _written(needs, render, [_USER])
    opened = _written(needs, render, [_USER], add_generation_prompt=True)
    turns = [_written(needs, render, [_USER, one]) for one in (_ANSWER, _conversation()[1])]
    texts = [text or "" for text in (opened, *turns)]
    if asked is None or not all(text.startswith(asked) for text in texts):
        return "", False
    opening = _OPEN_MARKER.sub("", _common_prefix(texts))
    header, found, _ = texts[-1][len(opening) :].partition(_NAME)
    return header if found else "", texts[1].startswith(opening + _ANSWER["content"])


def _agent_arguments(needs: TemplateNeeds, render: TryRender) -> dict[str, bool]:
    """Return the template arguments that keep reasoning which is dropped without them."""
    turns = needs.adapt([*_conversation(_THOUGHT), _ANSWER, _USER])
    if _THOUGHT in (render(turns, [_TOOL]) or _THOUGHT):
        return {}
    for arguments in _KEEPS_REASONING:
        if _THOUGHT in (render(turns, [_TOOL], **arguments) or ""):
            return arguments
    return {}


def _common_prefix(texts: list[str]) -> str:
    chars = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in chars)


def _conversation(reasoning: str | None = None, content: str = "", calls: int = 1) -> Messages:
    """Return a conversation up to the results of calls."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    message["tool_calls"] = []
    results: Messages = []
    for number, value in enumerate(_VALUES[:calls]):
        call_id = f"call_012345678{number}"
        function = {"name": _NAME, "arguments": {_KEY: value}}
        message["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": _RESULT})
    return [_USER, message, *results]
