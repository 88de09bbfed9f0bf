# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""The table of model families: its splits, templates and formats are those of the code."""

from typing import Any

import pytest

from services.gateway.output import families
from services.gateway.output.families import REASONING_FORMATS, TOOL_FORMATS
from services.gateway.tokenizing import loading, typescript_tools
from shared.model.sharding.families import model_family
from tests.clients.model.families import families as families_of_agents
from tests.unit.gateway.tokenizing import models_page

_QWEN = "<|im_start|> <|im_end|> <tools> <tool_call> </tool_call> <tool_response>"
_QWEN_XML = f"{_QWEN} <function= <parameter= </parameter> </function>"
_THINK = "<think> </think>"
_GLM = (
    f"[gMASK]<sop> <|system|> <|user|> <|assistant|> <|observation|> <tools> {_THINK} "
    "<tool_call> <arg_key> </arg_key> <arg_value> </arg_value> </tool_call> <tool_response>"
)
_KIMI = (
    "<|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_end|>"
)
_DEEPSEEK = (
    f"<｜User｜> <｜Assistant｜> {_THINK} <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> "
    "<｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁output▁begin｜>"
)
_GEMMA = (
    "<|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> <|tool_call> "
    "<tool_call|> <|tool_response> <tool_response|>"
)
_MISTRAL = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]"
_MARKS: dict[str, list[str]] = {
    "llama": ["{%- if tools %} <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>"],
    "qwen3": [f"{_QWEN} {_THINK}"],
    "qwen3_moe": [f"{_QWEN} {_THINK}", _QWEN_XML],
    "qwen3_next": [f"{_QWEN} {_THINK}"],
    "qwen3_5_moe": [f"{_QWEN_XML} {_THINK} <|vision_start|> <|image_pad|>"],
    "kimi_k25": [f"{_KIMI} {_THINK} <|media_begin|> {typescript_tools.ARGUMENT}", _KIMI],
    "kimi_linear": [_KIMI],
    "glm4_moe": [_GLM],
    "glm_moe_dsa": [_GLM],
    "deepseek_v3": [_DEEPSEEK],
    "minimax": [
        f"]~!b[ ]~b] [e~[ <tools> <minimax:tool_call> <invoke name= <parameter name= {_THINK}"
    ],
    "gpt_oss": ["<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>"],
    "mistral4": [f"[SYSTEM_PROMPT] {_MISTRAL} [ARGS] [THINK] [/THINK]"],
    "mixtral": [_MISTRAL],
    "gemma4_text": [_GEMMA],
    "granitemoehybrid": [
        "<|start_of_role|> <|end_of_role|> <tools> <tool_call> </tool_call> <tool_response>"
    ],
    "nemotron_h": [f"{_QWEN_XML} {_THINK}"],
    "step3p5": [f"{_QWEN_XML} {_THINK} <im_patch>"],
}
"""The marks in the chat templates that the authors of each family publish; one text for each of
their models with marks of its own."""


def _named(cell: str) -> set[str]:
    return {name for name in cell.split(", ") if name}


def _templates(model_type: str) -> list[str]:
    """Return the templates of a family, or their marks."""
    if model_type in loading._TEMPLATES:
        return [(loading._TEMPLATES_FOLDER / loading._TEMPLATES[model_type]).read_text("utf-8")]
    return _MARKS[model_type]


@pytest.mark.parametrize("row", models_page.rows(), ids=lambda row: row["model_type"])
def test_row_of_models_page_has_the_splits_and_formats_of_the_code(row: dict[str, Any]) -> None:
    """The splits follow from mlx-lm's source, the formats from the marks of the templates."""
    model_type = row["model_type"]
    family = model_family({"model_type": model_type})
    assert family is not None
    splits = {
        "tensor": family.shards,
        "expert": family.has_experts,
        "pipeline": family.pipelines,
    }
    assert _named(row["splits"]) == {name for name, is_possible in splits.items() if is_possible}
    chosen = [
        families.choose(text, {"model_type": model_type}, {}) for text in _templates(model_type)
    ]
    tools, reasoning = {one.tool_format for one in chosen}, {one.reasoning_format for one in chosen}
    assert _named(row["tool calls"]) == tools <= TOOL_FORMATS.keys()
    assert _named(row["reasoning"]) == reasoning - {families.OFF} <= REASONING_FORMATS.keys()
    assert row["tokenizer file"] in loading.FILES


@pytest.mark.parametrize("row", models_page.rows(), ids=lambda row: row["model_type"])
def test_row_of_models_page_says_whose_template_and_which_tests_it_has(
    row: dict[str, Any],
) -> None:
    """Lockstep's template is one of its files; agents and rings are those of the tests."""
    model_type = row["model_type"]
    has_typescript = any(typescript_tools.ARGUMENT in text for text in _templates(model_type))
    own = "own, tools as TypeScript" if has_typescript else "own"
    assert row["chat template"] == ("Lockstep's" if model_type in loading._TEMPLATES else own)

    tests = {"tiny model"}
    if model_type in {family.model_type for family in families_of_agents()}:
        tests.add("agents")
    ring = models_page.FILE.parents[2] / "tests" / "multirank" / "splits" / "test_splits.py"
    if f'"{model_type}"' in ring.read_text(encoding="utf-8"):
        tests.add("ring")
    assert _named(row["tested with"]) == tests
