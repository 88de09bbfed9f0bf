# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Choice of a model's formats: by template, parser type and model type, or as configured."""

import re
from pathlib import Path
from typing import get_args

import pytest

from services.gateway.output import families
from services.gateway.output.families import OutputFormat
from shared.configuration.settings import ReasoningFormatName, ToolFormat

_TEMPLATES = {
    "Qwen3": (
        "'\\n<tool_call>\\n{\"name\": \"' ... '</tool_call>' ... '</think>' in content",
        OutputFormat("hermes", "think"),
    ),
    "Qwen 2.5": ('<tool_call>\\n{"name": <function-name>', OutputFormat("hermes", "off")),
    "Qwen3-Coder": ("<tool_call>\\n<function=example>", OutputFormat("qwen_xml", "off")),
    "Nemotron 3, Step": ("<think> <tool_call> <function=", OutputFormat("qwen_xml", "think")),
    "GLM": ("<tool_call>{name}<arg_key> <think></think>", OutputFormat("glm", "think")),
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        OutputFormat("kimi_k2", "off"),
    ),
    "MiniMax M2": ("<minimax:tool_call> ']~b]ai\\n<think>'", OutputFormat("minimax", "think")),
    "Mistral": ("[TOOL_CALLS] [ARGS] [THINK]", OutputFormat("mistral", "mistral")),
    "Llama 3": ("{% if tools %}<|start_header_id|>", OutputFormat("llama3", "off")),
    "Llama 3 without tools": ("<|start_header_id|>", OutputFormat("off", "off")),
    "DeepSeek V3": ("<｜tool▁calls▁begin｜> </think>", OutputFormat("deepseek_v3", "think")),
    "DeepSeek V3.2": ("<｜DSML｜function_calls> <think>", OutputFormat("deepseek_v32", "think")),
    "gpt-oss": ("<|start|><|channel|>final<|message|>", OutputFormat("harmony", "harmony")),
    "Gemma 4": ("<|tool_call>call: <tool_call|> <|channel>", OutputFormat("gemma4", "gemma4")),
    "FunctionGemma": ("<start_function_call>", OutputFormat("function_gemma", "off")),
    "Granite 3": ("<|tool_call|>", OutputFormat("granite3", "off")),
    "Granite 4.0": (
        '<|start_of_role|>system ... <tool_call>\\n{\\"name\\": <function-name>',
        OutputFormat("hermes", "off"),
    ),
    "LFM2": ("<|tool_list_start|>", OutputFormat("lfm2", "off")),
    "Functionary 3.1": ("<function=example>{json}</function>", OutputFormat("qwen_xml", "off")),
    "Apriel": ("<tool_calls>[ [BEGIN FINAL RESPONSE]", OutputFormat("jamba", "apriel")),
    "no tools": ("{{ message.content }}", OutputFormat("off", "off")),
}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_formats_are_chosen_by_texts_of_the_chat_template(name: str) -> None:
    """Each family's template leads to its formats."""
    template, expected = _TEMPLATES[name]

    assert families.choose(template, {}, {}) == expected


def test_parser_type_of_mlx_lm_is_preferred_to_the_template() -> None:
    """A converted model may name its format in tokenizer_config.json."""
    found = families.choose("<tool_call>", {}, {"tool_parser_type": "qwen3_coder"})

    assert found == OutputFormat("qwen_xml", "off")
    assert families.choose("<tool_call>", {}, {"tool_parser_type": "new"}).tool_format == "hermes"


def test_model_type_decides_if_the_template_names_no_format() -> None:
    """Kimi K2's first templates do not show its calls."""
    assert families.choose("", {"model_type": "kimi_k2"}, {}) == OutputFormat("kimi_k2", "think")


def test_tokens_decide_if_the_template_names_no_format() -> None:
    """Conversions of LFM2.5 have the tokens of calls, and no word of them in the template."""
    found = families.choose("", {}, {}, {"<|tool_call_start|>": 1})

    assert found == OutputFormat("lfm2", "off")


def test_configured_formats_are_taken_as_they_are() -> None:
    """Settings override what would be found, and off means that nothing is parsed."""
    found = families.choose("<tool_call> <think>", {}, {}, (), "pythonic", "off")

    assert found == OutputFormat("pythonic", "off")
    assert not families.choose("<tool_call>", {}, {}, (), "off", "auto").has_tool_calls
    assert OutputFormat("hermes", "off").parser([], "") is None


def test_settings_name_exactly_the_known_formats() -> None:
    """Every format can be configured, and no other."""
    assert set(get_args(ToolFormat)) == {"auto", "off", *families.TOOL_FORMATS}
    assert set(get_args(ReasoningFormatName)) == {"auto", "off", *families.REASONING_FORMATS}


def test_all_formats_of_the_tables_exist() -> None:
    """Every way of choosing leads to a format."""
    tools = {name for name, _ in families._TOOLS_BY_TEXT}
    tools |= {name for _, name in families._TOOLS_BY_TOKEN}
    tools |= set(families._BY_PARSER_TYPE.values())
    tools |= {tool for tool, _ in families._BY_MODEL_TYPE.values()}
    reasoning = {name for name, _ in families._REASONING_BY_TEXT}
    reasoning |= {one for _, one in families._BY_MODEL_TYPE.values()}

    assert tools == set(families.TOOL_FORMATS)
    assert reasoning == set(families.REASONING_FORMATS)


def test_special_texts_are_those_of_the_formats_in_use() -> None:
    """Markers of calls are written out only if the model may call tools; Harmony's always."""
    kimi = OutputFormat("kimi_k2", "think")

    assert kimi.special_texts(has_tools=False) == {"<think>", "</think>"}
    assert {"<|tool_call_begin|>", "<|tool_call_argument_begin|>"} < kimi.special_texts(
        has_tools=True
    )
    assert "<|message|>" in OutputFormat("harmony", "harmony").special_texts(has_tools=False)
    assert '<|"|>' in OutputFormat("gemma4", "off").special_texts(has_tools=True)


def test_reference_lists_exactly_the_known_formats() -> None:
    """Operators find every format on one page."""
    page = Path(__file__).parents[4] / "docs" / "reference" / "tool-calls.md"
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(listed) == sorted([*families.TOOL_FORMATS, *families.REASONING_FORMATS])
