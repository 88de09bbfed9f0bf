# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Transcripts of models that write about tool calls, as well as making them.

Every family has the same cases, with its own spelling of a call.
"""

from services.gateway.output import families
from tests.unit.gateway.output.transcript import Transcript

_DSML = "｜DSML｜"
_JSON = '{"name": "@", "arguments": {"path": "x"}}'
_PARAMETERS = '{"name": "@", "parameters": {"path": "x"}}'
_QWEN = "<function=@>\n<parameter=path>\nx\n</parameter>\n</function>"
_INVOKE = (
    f'<{_DSML}invoke name="@">\n'
    f'<{_DSML}parameter name="path" string="true">x</{_DSML}parameter>\n</{_DSML}invoke>'
)
_CALLS = {
    "command": f"<|START_ACTION|>[{_PARAMETERS.replace('name', 'tool_name')}]<|END_ACTION|>",
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>@<｜tool▁sep｜>{"path": "x"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": f"<{_DSML}function_calls>\n{_INVOKE}\n</{_DSML}function_calls>",
    "deepseek_v4": f"<{_DSML}tool_calls>\n{_INVOKE}\n</{_DSML}tool_calls>",
    "function_gemma": "<start_function_call>call:@{path:<escape>x<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:@{path:<|"|>x<|"|>}<tool_call|>',
    "glm": "<tool_call>@\n<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "granite3": f"<|tool_call|>[{_JSON}]",
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "jamba": f"<tool_calls>[{_JSON}]</tool_calls>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.@:0<|tool_call_argument_begin|>"
        '{"path": "x"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "lfm2": '<|tool_call_start|>[@(path="x")]<|tool_call_end|>',
    "llama3": f"<|python_tag|>{_PARAMETERS}",
    "llama4": f"<|python_start|>{_PARAMETERS}<|python_end|>",
    "longcat": (
        "<longcat_tool_call>@\n<longcat_arg_key>path</longcat_arg_key>\n"
        "<longcat_arg_value>x</longcat_arg_value>\n</longcat_tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="@">\n<parameter name="path">x</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "mistral": '[TOOL_CALLS]@[ARGS]{"path": "x"}',
    "nemotron": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "olmo3": '<function_calls>\n@(path="x")\n</function_calls>',
    "phi4": f"<|tool_call|>[{_JSON}]<|/tool_call|>",
    "qwen_xml": f"<tool_call>\n{_QWEN}\n</tool_call>",
    "seed": f"<seed:tool_call>\n{_QWEN}\n</seed:tool_call>",
}
"""A call of every family whose calls have a marker, with @ in place of the tool's name."""
_EDIT_X = ("edit-file", {"path": "x"})


def _empty_section(tool_format: str) -> str:
    form = families.TOOL_FORMATS[tool_format]
    return f"Calls stand between `{form.openings[0]}{''.join(form.special_texts[-2:])}`, always."


def _cases(tool_format: str, spelled: str) -> list[Transcript]:
    """Return the cases of one family."""
    known, unknown = (spelled.replace("@", name) for name in ("edit-file", "NAME"))
    [opening, *_] = families.TOOL_FORMATS[tool_format].openings
    broken = unknown[: unknown.index("NAME") + len("NAME")] + " and the arguments after it."

    def text(name: str, text: str) -> Transcript:
        return Transcript(name, tool_format, text, text, reasoning_format="think")

    def thought(name: str, text: str) -> Transcript:
        return Transcript(name, tool_format, f"<think>{text}</think>So.", "So.", (), text, "think")

    return [
        text("marker in a sentence", f"Calls begin with {opening} and have a name."),
        text("marker in backticks", f"Calls begin with `{opening}`.\nThat is `all`, see there."),
        text("name in a sentence", f"Write {broken} More text."),
        text("markers in backticks", _empty_section(tool_format)),
        text("call in backticks", f"Write `{known}` to edit, or ``{unknown}``, and wait."),
        text("call in a block of code", f"So:\n\n```xml\n{unknown}\n```\nThe end."),
        thought("marker in reasoning", f"I could write {opening} here."),
        thought("name in reasoning", f"I could write {broken} Not now."),
        thought("call in reasoning", f"The format is {unknown} or `{known}` then."),
        Transcript("unknown tool", tool_format, unknown, calls=(("NAME", {"path": "x"}),)),
        Transcript(
            "call after mentions",
            tool_format,
            f"As ``{known}``, or `{opening}`:\n```\ncode\n```\n{known}",
            f"As ``{known}``, or `{opening}`:\n```\ncode\n```",
            (_EDIT_X,),
        ),
        Transcript(
            "call begun in reasoning and in a block of code",
            tool_format,
            f"<think>Hm.\n{known}<think>So.</think>```\n{known}",
            "```",
            (_EDIT_X, _EDIT_X),
            "Hm.\n\nSo.",
            "think",
        ),
    ]


_BROKEN_JSON = '<tool_call>NAME\n<arg_key>path</arg_key>\n<arg_value>{"x</arg_value>, for example.'
MENTIONS = [
    *(one for name, spelled in _CALLS.items() for one in _cases(name, spelled)),
    Transcript("broken JSON", "glm", _BROKEN_JSON, _BROKEN_JSON),
]
