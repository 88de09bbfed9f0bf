# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Families of models: which format of tool calls and of reasoning a model writes.

Owns the table of formats by name and their choice; a format's grammar is in `calls` and `harmony`.
"""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from services.gateway.conversation.conversation import Tool
from services.gateway.output.calls.call_format import CallFormat
from services.gateway.output.calls.gemma_calls import GemmaCalls
from services.gateway.output.calls.header_calls import HeaderCalls
from services.gateway.output.calls.json_calls import JsonCalls
from services.gateway.output.calls.python_calls import PythonCalls
from services.gateway.output.calls.tagged_calls import Tag, TaggedCalls
from services.gateway.output.completion_parser import CompletionParser, ReasoningFormat
from services.gateway.output.harmony import Harmony

OFF = "off"
"""Name in place of a format: calls or reasoning stay text."""
HARMONY = "harmony"
AUTO = "auto"
"""Name in place of a format: chosen by the model's template and configuration."""

_FUNCTION = Tag("<function=", ">")
_PARAMETER = Tag("<parameter=", ">")
_DSML = "｜DSML｜"

TOOL_FORMATS: dict[str, CallFormat | Harmony] = {
    HARMONY: Harmony(),
    "minimax": TaggedCalls(
        section=Tag("<minimax:tool_call>", "</minimax:tool_call>"),
        name=Tag('<invoke name="', '">'),
        call_closing="</invoke>",
        key=Tag('<parameter name="', '">'),
        value=Tag("", "</parameter>"),
    ),
    "gemma4": GemmaCalls(opening="<|tool_call>", closing="<tool_call|>", quote='<|"|>'),
    "function_gemma": GemmaCalls(
        opening="<start_function_call>", closing="<end_function_call>", quote="<escape>"
    ),
    "longcat": TaggedCalls(
        section=Tag("<longcat_tool_call>", "</longcat_tool_call>"),
        name=Tag("", ""),
        key=Tag("<longcat_arg_key>", "</longcat_arg_key>"),
        value=Tag("<longcat_arg_value>", "</longcat_arg_value>"),
    ),
    "glm": TaggedCalls(
        section=Tag("<tool_call>", "</tool_call>"),
        name=Tag("", ""),
        key=Tag("<arg_key>", "</arg_key>"),
        value=Tag("<arg_value>", "</arg_value>"),
    ),
    "kimi_k2": HeaderCalls(
        section_opening="<|tool_calls_section_begin|>",
        section_closing="<|tool_calls_section_end|>",
        call_opening="<|tool_call_begin|>",
        separator="<|tool_call_argument_begin|>",
        call_closing="<|tool_call_end|>",
        has_id_as_name=True,
    ),
    "deepseek_v32": TaggedCalls(
        section=Tag(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
        name=Tag(f'<{_DSML}invoke name="', '">'),
        call_closing=f"</{_DSML}invoke>",
        key=Tag(f'<{_DSML}parameter name="', '" string="false">'),
        string_key_closing='" string="true">',
        value=Tag("", f"</{_DSML}parameter>"),
    ),
    "deepseek_v4": TaggedCalls(
        section=Tag(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"),
        name=Tag(f'<{_DSML}invoke name="', '">'),
        call_closing=f"</{_DSML}invoke>",
        key=Tag(f'<{_DSML}parameter name="', '" string="false">'),
        string_key_closing='" string="true">',
        value=Tag("", f"</{_DSML}parameter>"),
    ),
    "deepseek_v3": HeaderCalls(
        section_opening="<｜tool▁calls▁begin｜>",
        section_closing="<｜tool▁calls▁end｜>",
        call_opening="<｜tool▁call▁begin｜>",
        separator="<｜tool▁sep｜>",
        call_closing="<｜tool▁call▁end｜>",
    ),
    "seed": TaggedCalls(
        section=Tag("<seed:tool_call>", "</seed:tool_call>"),
        name=_FUNCTION,
        call_closing="</function>",
        key=_PARAMETER,
        value=Tag("", "</parameter>"),
        has_lines=True,
    ),
    "lfm2": PythonCalls(opening="<|tool_call_start|>", closing="<|tool_call_end|>"),
    "olmo3": PythonCalls(opening="<function_calls>", closing="</function_calls>", has_lines=True),
    "qwen_xml": TaggedCalls(
        section=Tag("<tool_call>", "</tool_call>"),
        name=_FUNCTION,
        call_closing="</function>",
        key=_PARAMETER,
        value=Tag("", "</parameter>"),
        has_lines=True,
        begins_with_name=True,
    ),
    "mistral": HeaderCalls(
        call_opening="[TOOL_CALLS]",
        separator="[ARGS]",
        id_opening="[CALL_ID]",
        has_short_ids=True,
        reads_lists=True,
    ),
    "command": JsonCalls(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        has_list=True,
        name_key="tool_name",
        arguments_key="parameters",
        number_key="tool_call_id",
    ),
    "nemotron": JsonCalls("<TOOLCALL>", "</TOOLCALL>", has_list=True),
    "phi4": JsonCalls("<|tool_call|>", "<|/tool_call|>", has_list=True),
    "granite3": JsonCalls(
        "<|tool_call|>",
        "</tool_call>",
        writes_closing=False,
        others=("<tool_call>",),
        has_list=True,
    ),
    "jamba": JsonCalls("<tool_calls>", "</tool_calls>", has_list=True),
    "hermes": JsonCalls("<tool_call>", "</tool_call>"),
    "llama4": JsonCalls(
        "<|python_start|>", "<|python_end|>", reads_bare=True, arguments_key="parameters"
    ),
    "llama3": JsonCalls("<|python_tag|>", reads_bare=True, arguments_key="parameters"),
    "pythonic": PythonCalls(),
}
"""Formats of tool calls by name."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", is_certain=True),
    "gemma4": ReasoningFormat(
        "<|channel>thought\n", "<channel|>", is_certain=True, special_texts=("<|channel>",)
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", is_certain=True),
    "command": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", is_certain=True),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "longcat": ReasoningFormat("<longcat_think>", "</longcat_think>"),
    "lfm2": ReasoningFormat("<|think:start|>", "<|think:end|>", is_certain=True),
    "apriel": ReasoningFormat("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    "think": ReasoningFormat("<think>", "</think>"),
}
"""Formats of reasoning by name."""

_TOOLS_BY_TEXT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("minimax", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm", ("<arg_key>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("deepseek_v4", (_DSML, "tool_calls>")),
    ("deepseek_v32", (_DSML,)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("seed", ("<seed:tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("qwen_xml", ("<function=",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("command", ("<|START_ACTION|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("phi4", ("<|tool_call|>", "<|/tool_call|>")),
    ("granite3", ("<|tool_call|>",)),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama4", ("<|header_start|>", "tools")),
    ("llama3", ("<|start_header_id|>", "tools")),
)
"""Formats of tool calls with texts that a template has if its model writes them; first hit."""

_TOOLS_BY_TOKEN = (("<|tool_call_start|>", "lfm2"), ("<|tool_call_begin|>", "kimi_k2"))
"""Formats by a token that only models of the family have, if the template says none."""

_REASONING_BY_TEXT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>",)),
    ("mistral", ("[THINK]",)),
    ("command", ("<|START_THINKING|>",)),
    ("seed", ("<seed:think>",)),
    ("longcat", ("<longcat_think>",)),
    ("lfm2", ("<|think:start|>",)),
    ("apriel", ("[BEGIN FINAL RESPONSE]",)),
    ("think", ("</think>",)),
    ("think", ("<think>",)),
)

_BY_PARSER_TYPE = {
    "function_gemma": "function_gemma", "gemma4": "gemma4", "glm47": "glm", "laguna": "glm",
    "json_tools": "hermes", "kimi_k2": "kimi_k2", "longcat": "longcat", "minimax_m2": "minimax",
    "mistral": "mistral", "pythonic": "lfm2", "qwen3_coder": "qwen_xml",
}  # fmt: skip
"""Formats by `tool_parser_type` in tokenizer_config.json, with mlx-lm's names."""

_BY_MODEL_TYPE = {
    "deepseek_v32": ("deepseek_v32", "think"), "deepseek_v4": ("deepseek_v4", "think"),
    "gpt_oss": (HARMONY, HARMONY), "kimi_k2": ("kimi_k2", "think"),
    "kimi_k25": ("kimi_k2", "think"),
}  # fmt: skip
"""Formats of tool calls and reasoning by `model_type` in config.json, if the template says none."""


@dataclasses.dataclass(frozen=True)
class OutputFormat:
    """What a model's completions are made of."""

    tool_format: str = OFF
    """Name of the format of its tool calls."""
    reasoning_format: str = OFF
    """Name of the format of its reasoning."""

    @property
    def has_tool_calls(self) -> bool:
        """The model can call tools."""
        return self.tool_format != OFF

    def parser(self, tools: list[Tool], prompt_tail: str) -> CompletionParser | None:
        """Return a parser for one completion; None if all of its text is the answer.

        Args:
            tools: the tools that the model may call; without any, calls are text.
            prompt_tail: the end of the rendered prompt.
        """
        calls = self._calls(has_tools=bool(tools))
        reasoning = REASONING_FORMATS.get(self.reasoning_format)
        if calls is None and reasoning is None:
            return None
        offered = tools if self.has_tool_calls else []
        return CompletionParser(calls, reasoning, offered, prompt_tail, self.tool_format)

    def simplify(self, text: str) -> str:
        """Return the text of a turn in one spelling, where template and model have different ones.

        Args:
            text: the text, from the end of the prompt on.
        """
        is_harmony = HARMONY in (self.tool_format, self.reasoning_format)
        return Harmony.simplify(text) if is_harmony else text

    def special_texts(self, *, has_tools: bool) -> frozenset[str]:
        """Return the texts that must reach the parser even if they are special tokens.

        Args:
            has_tools: the model may call tools.
        """
        texts: set[str] = set()
        calls = self._calls(has_tools=has_tools)
        if calls is not None:
            texts.update(calls.openings, calls.special_texts)
        reasoning = REASONING_FORMATS.get(self.reasoning_format)
        if reasoning is not None:
            texts.update((reasoning.opening, reasoning.closing, *reasoning.special_texts))
        return frozenset(texts)

    def _calls(self, *, has_tools: bool) -> CallFormat | Harmony | None:
        if self.reasoning_format == HARMONY:
            # Its channels part the answer from the rest, also without tools.
            return TOOL_FORMATS[HARMONY]
        return TOOL_FORMATS.get(self.tool_format) if has_tools else None


def choose(
    template: str,
    config: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    vocabulary: Container[str] = (),
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
) -> OutputFormat:
    """Return the formats that a model writes.

    Args:
        template: text of its chat template, "" without one.
        config: content of its config.json.
        tokenizer_config: content of its tokenizer_config.json.
        vocabulary: the texts of its tokens.
        tool_format: a format's name, `off`, or `auto` to find it.
        reasoning_format: as `tool_format`.
    """
    by_model = _BY_MODEL_TYPE.get(str(config.get("model_type")), (OFF, OFF))
    if tool_format == AUTO:
        given = _BY_PARSER_TYPE.get(str(tokenizer_config.get("tool_parser_type")))
        by_token = next((name for token, name in _TOOLS_BY_TOKEN if token in vocabulary), None)
        tool_format = given or _first(_TOOLS_BY_TEXT, template) or by_token or by_model[0]
    if reasoning_format == AUTO:
        reasoning_format = _first(_REASONING_BY_TEXT, template) or by_model[1]
    return OutputFormat(tool_format, reasoning_format)


def _first(table: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    for name, texts in table:
        if all(text in template for text in texts):
            return name
    return None
