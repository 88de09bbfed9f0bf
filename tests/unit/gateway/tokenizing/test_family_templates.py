"""Chat templates of families that publish a program in place of a part of their template."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tokenizing import loading, tokenizer
from services.gateway.tokenizing.typescript_tools import declare_tools
from shared.configuration.settings import ModelConfig
from tests.support.effort import cases
from tests.unit.gateway.tokenizing import rank_files, small_tokenizers
from tests.unit.gateway.tokenizing.test_loading import KIMI_PATTERN

_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.\nAll of it.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Its path.", "minLength": 1},
                "lines": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "mode": {"enum": ["text", "bytes"], "default": "text"},
                "at": {"$ref": "#/$defs/Place"},
                "limit": {"type": ["integer", "null"]},
                "how": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            },
            "required": ["path"],
            "additionalProperties": False,
            "$defs": {"Place": {"type": "object", "properties": {"line": {"type": "integer"}}}},
        },
    },
}
_DECLARED = """# Tools

## functions
namespace functions {
interface Place {
  line?: number
}
// Reads a file.
// All of it.
type read = (_: {
  // Its path.
  // minLength: 1
  path: string,
  at?: Place,
  how?: string | {},
  limit?: number | null,
  lines?: Array<
    // minimum: 0
    number
  >,
  // Default: "text"
  mode?: "text" | "bytes",
  [k: string]: never
}) => any;
}
"""
_REFERENCE = importlib.util.find_spec("mlx_lm")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """Return mlx-lm's port of DeepSeek's program, from its file: mlx-lm itself needs MLX."""
    assert _REFERENCE is not None
    assert _REFERENCE.origin is not None
    file = Path(_REFERENCE.origin).parent / "chat_templates" / "deepseek_v32.py"
    spec = importlib.util.spec_from_file_location("deepseek_v32_reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the tokenizer of a folder with DeepSeek V3.2's model type and no chat template."""
    folder = tmp_path_factory.mktemp("deepseek")
    small_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text('{"model_type": "deepseek_v32"}')
    return loading.load_inner(folder, ModelConfig(path=str(folder)))


_text = st.sampled_from(["", "One two.", "x\n\ny", "<b>ü & '漢'</b>"])
_arguments: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["path", "n", "deep"]),
    st.sampled_from(["a.py", "1", 1, 2.5, True, None, ["x", {"ü": 1}], {}, "<tag>"]),
    max_size=3,
)


@st.composite
def _conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(_text)}]
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(_text)})
        for _ in range(draw(st.integers(0, 3))):
            calls = [
                {"type": "function", "function": {"name": "read", "arguments": arguments}}
                for arguments in draw(st.lists(_arguments, min_size=1, max_size=2))
            ]
            thought = draw(st.sampled_from(["", "I think."]))
            message = {"role": "assistant", "content": draw(_text), "tool_calls": calls}
            messages.append({**message, "reasoning_content": thought})
            messages += [{"role": "tool", "content": draw(_text)} for _ in calls]
        if draw(st.booleans()):
            answer = {"role": "assistant", "content": "Done.", "reasoning_content": "I am done."}
            messages.append(answer)
    return messages


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return list(copied)


@settings(max_examples=cases(100, 300))
@given(
    messages=_conversations(),
    tools=st.sampled_from([None, [_TOOL], [_TOOL, _TOOL]]),
    thinks=st.sampled_from([None, True, False]),
)
def test_deepseek_v32_template_gives_the_text_of_the_models_program(
    deepseek: Any,
    reference: ModuleType,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    thinks: bool | None,
) -> None:
    """For any conversation, with and without tools and reasoning, both texts are equal."""
    mode = "chat" if thinks is False else "thinking"
    expected = reference.encode_messages(_with_text_arguments(messages), mode, tools=tools)
    arguments = {} if thinks is None else {"enable_thinking": thinks}
    found = deepseek.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **arguments
    )
    assert found == expected
    closed = deepseek.apply_chat_template(messages, tools=tools, tokenize=False, **arguments)
    assert expected.startswith(closed)


def test_deepseek_v32_tools_are_declared_without_a_system_message(deepseek: Any) -> None:
    """The declaration then comes first."""
    text = deepseek.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tools=[_TOOL], tokenize=False
    )
    assert text.startswith("<｜begin▁of▁sentence｜>\n\n## Tools\n\nYou have access")  # noqa: RUF001
    assert text.count("## Tools") == 1
    assert text.endswith("</functions>\n<｜User｜>Hi")  # noqa: RUF001


def test_template_of_the_models_folder_is_kept(tmp_path: Path) -> None:
    """A conversion that brings a template for DeepSeek V3.2 uses it."""
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert loading.load_inner(tmp_path, ModelConfig(path=str(tmp_path))).chat_template == "own"


def test_tools_are_declared_as_kimi_learned_them() -> None:
    """Required fields come first, descriptions and limits are comments, definitions interfaces."""
    assert declare_tools([_TOOL]) == _DECLARED


def test_schema_that_refers_to_itself_is_declared_as_an_interface() -> None:
    """The function then takes the interface `parameters`."""
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}, "a": {"type": "boolean"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    declared = declare_tools([tool])
    assert declared is not None
    assert "interface parameters {\n  a?: boolean,\n  next?: parameters\n}" in declared
    assert "type go = (_: parameters) => any;" in declared


@pytest.mark.parametrize("schema", [{"properties": {"a": {"title": "x"}}}, {"properties": 3}])
def test_tool_whose_schema_has_no_typescript_form_is_left_to_the_template(
    schema: dict[str, Any],
) -> None:
    """None stands for a schema without a type."""
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    assert declare_tools([tool]) is None


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        (_TOOL, _DECLARED),
        ({"function": {"name": "x", "parameters": {"properties": 3}}}, '"properties": 3'),
    ],
)
def test_kimi_prompt_has_tools_as_typescript_or_else_as_json(
    tmp_path: Path, tool: dict[str, Any], shown: str
) -> None:
    """The template gets the declarations as `tools_ts_str`, as from the model's own class."""
    folder = rank_files.write_kimi(tmp_path, KIMI_PATTERN)
    template = (
        "{%- if tools %}<|im_system|>tool_declare<|im_middle|>"
        "{%- if tools_ts_str %}{{- tools_ts_str }}{%- else %}{{- tools | tojson }}{%- endif %}"
        "<|im_end|>{%- endif %}" + rank_files.KIMI_TEMPLATE
    )
    (folder / "chat_template.jinja").write_text(template)
    loaded = tokenizer.load(ModelConfig(path=str(folder)))
    prompt = loaded.encode_chat([{"role": "user", "content": "Hi"}], [tool], {})
    text = loaded.decode_whole(list(prompt.ids))
    assert text.startswith("<|im_system|>tool_declare<|im_middle|>")
    assert shown in text
    assert text.endswith("Hi<|im_end|><|im_assistant|>assistant<|im_middle|>")


def test_tokenizer_without_any_template_stays_without_one() -> None:
    """Nothing is declared for a model that has no chat template."""
    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=small_tokenizers.byte_level())
    loading._complete_template(inner, Path("/nonexistent"))
    assert inner.chat_template is None
