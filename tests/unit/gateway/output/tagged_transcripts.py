# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Transcripts of families that write arguments between tags."""

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from tests.unit.gateway.output.transcript import (
    BOTH,
    CLOSERS,
    CLOSERS_CALL,
    EDIT,
    EDIT_CALL,
    HARD_TEXT,
    NOW,
    PARIS,
    Call,
    Transcript,
    as_json,
)


def _qwen(name: str, arguments: dict[str, str]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, str]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _named(tag: str, name: str, arguments: dict[str, str]) -> str:
    parameters = "".join(
        f'<{tag}parameter name="{key}"{_mark(tag, key)}>{value}</{tag}parameter>\n'
        for key, value in arguments.items()
    )
    return f'<{tag}invoke name="{name}">\n{parameters}</{tag}invoke>\n'


def _mark(tag: str, key: str) -> str:
    is_string = "true" if key in ("path", "text") else "false"
    return f' string="{is_string}"' if tag else ""


_RAW = {"path": "a.py", "text": HARD_TEXT, "line": "3", "force": "true", "owner": "null"}
_TYPED = {
    "path": "3",
    "line": "3",
    "ratio": "2.50",
    "force": "False",
    "owner": "nullable",
    "limit": "null",
    "ranges": "[1, 2]",
    "options": '{"a": {"b": null}}',
    "anything": "true",
}
_ENDS = [
    "</parameter><parameter=x>",
    "</parameter>\\n</function></tool_call>",
    "</arg_value><arg_key>",
    '"</arg_value></tool_call>',
    "</parameter></invoke></minimax:tool_call>",
]
"""Texts that end values of several formats, if they stand in no JSON."""
_ENDS_INSIDE = {"options": as_json({"a": _ENDS}), "anything": as_json(_ENDS)}
_ENDS_CALL: Call = ("edit-file", {"options": {"a": _ENDS}, "anything": _ENDS})
_QUOTES = {"anything": '"a', "more": 'b"', "most": '{"a": "', "last": '"}'}
"""A quote in one and a quote in the next would make one JSON string of both."""
_QUOTES_CALL: Call = ("edit-file", _QUOTES)
_TYPED_CALL: Call = (
    "edit-file",
    {
        "path": "3",
        "line": 3,
        "ratio": 2.5,
        "force": False,
        "owner": "nullable",
        "limit": None,
        "ranges": [1, 2],
        "options": {"a": {"b": None}},
        "anything": True,
    },
)
TAGGED = [
    Transcript(
        "two calls",
        "qwen_xml",
        f"Now.\n\n{_qwen('edit-file', _RAW)}\n{_qwen('now', {})}",
        "Now.",
        BOTH,
    ),
    Transcript("types", "qwen_xml", _qwen("edit-file", _TYPED), calls=(_TYPED_CALL,)),
    Transcript(
        "ends in value", "qwen_xml", _qwen("edit-file", {"text": CLOSERS}), calls=(CLOSERS_CALL,)
    ),
    Transcript("ends in JSON", "qwen_xml", _qwen("edit-file", _ENDS_INSIDE), calls=(_ENDS_CALL,)),
    Transcript(
        "end in broken JSON",
        "qwen_xml",
        f'{_qwen("edit-file", {"ranges": """[1, "a"""})}\nThat "is" it.',
        '\nThat "is" it.',
        (("edit-file", {"ranges": '[1, "a'}),),
    ),
    Transcript(
        "text like JSON",
        "qwen_xml",
        _qwen("edit-file", {"anything": "[1] and [2]", "options": "{'a': 1}"}),
        calls=(("edit-file", {"anything": "[1] and [2]", "options": {"a": 1}}),),
    ),
    Transcript(
        "quotes of two texts",
        "qwen_xml",
        _qwen("edit-file", _QUOTES),
        calls=(_QUOTES_CALL,),
    ),
    Transcript(
        "text after",
        "qwen_xml",
        f"{_qwen('now', {})}\nThat is it.",
        "\nThat is it.",
        calls=(NOW,),
    ),
    Transcript(
        "without opening tag",
        "qwen_xml",
        _qwen("edit-file", _RAW).removeprefix("<tool_call>\n"),
        calls=(EDIT_CALL,),
    ),
    Transcript(
        "without closing tag",
        "qwen_xml",
        _qwen("edit-file", {"line": "3", "path": "Paris"}).replace("\n</parameter>\n</f", "\n</f"),
        calls=(("edit-file", {"line": 3, "path": "Paris"}),),
    ),
    Transcript(
        "JSON inside",
        "qwen_xml",
        f"<tool_call>\n<function=edit-file>\n{as_json(EDIT)}\n</function>\n</tool_call>",
        calls=(EDIT_CALL,),
    ),
    Transcript(
        "text between arguments",
        "qwen_xml",
        "<tool_call><function=edit-file><parameter=line>3</parameter>\n"
        "<parameter=path>Paris</parameter>\n</function> hm </tool_call>",
        " hm </tool_call>",
        (("edit-file", {"line": 3, "path": "Paris"}),),
    ),
    Transcript(
        "arguments without end",
        "qwen_xml",
        '<tool_call><function=edit-file>{"path": "Paris"}\nThat is it.',
        "\nThat is it.",
        (PARIS,),
    ),
    Transcript(
        "argument without name",
        "qwen_xml",
        '<tool_call><function=edit-file><parameter=path>\na\n</parameter>\n<parameter="line">\n3\n'
        "</parameter>\n</function></tool_call>.",
        ".",
        (("edit-file", {"path": "a", INVALID_ARGUMENTS: '"line">\n3\n</parameter>\n'}),),
    ),
    Transcript(
        "broken JSON inside",
        "qwen_xml",
        '<tool_call><function=edit-file>{"path": "a", "line": }</function></tool_call>.',
        ".",
        (("edit-file", {"path": "a", "line": None, INVALID_ARGUMENTS: "}"}),),
    ),
    Transcript(
        "unknown tool without opening tag",
        "qwen_xml",
        "<function=NAME>\n<parameter=path>\nx\n</parameter>\n</function>",
        "<function=NAME>\n<parameter=path>\nx\n</parameter>\n</function>",
    ),
    Transcript("broken", "qwen_xml", "<tool_call>\n<func=a>", "<tool_call>\n<func=a>"),
    Transcript(
        "cut off after the name",
        "qwen_xml",
        "<tool_call>\n<function=now>\n",
        "<tool_call>\n<function=now>\n",
    ),
    Transcript(
        "cut off",
        "qwen_xml",
        "<tool_call>\n<function=edit-file>\n<parameter=text>\nhalf",
        calls=(("edit-file", {}),),
        is_cut=True,
    ),
    Transcript(
        "two calls", "glm", f"{_glm('edit-file', _RAW)}\n{_glm('now', {})} end", " end", BOTH
    ),
    Transcript("types", "glm", _glm("edit-file", _TYPED), calls=(_TYPED_CALL,)),
    Transcript("ends in value", "glm", _glm("edit-file", {"text": CLOSERS}), calls=(CLOSERS_CALL,)),
    Transcript("ends in JSON", "glm", _glm("edit-file", _ENDS_INSIDE), calls=(_ENDS_CALL,)),
    Transcript(
        "end in broken JSON",
        "glm",
        f'{_glm("edit-file", {"ranges": """[1, "a""", "path": "b"})} end',
        " end",
        (("edit-file", {"ranges": '[1, "a', "path": "b"}),),
    ),
    Transcript(
        "quotes of two texts",
        "glm",
        _glm("edit-file", _QUOTES),
        calls=(_QUOTES_CALL,),
    ),
    Transcript("compact", "glm", "<tool_call>now</tool_call>", calls=(NOW,)),
    Transcript("broken", "glm", "<tool_call>what is it?", "<tool_call>what is it?"),
    Transcript(
        "two calls",
        "minimax",
        f"Hm.<minimax:tool_call>\n{_named('', 'edit-file', _RAW)}{_named('', 'now', {})}"
        "</minimax:tool_call>",
        "Hm.",
        BOTH,
    ),
    Transcript(
        "ends in value",
        "minimax",
        f"<minimax:tool_call>{_named('', 'edit-file', {'text': CLOSERS})}</minimax:tool_call>!",
        "!",
        (CLOSERS_CALL,),
    ),
    Transcript(
        "ends in JSON",
        "minimax",
        f"<minimax:tool_call>{_named('', 'edit-file', _ENDS_INSIDE)}</minimax:tool_call>",
        calls=(_ENDS_CALL,),
    ),
    Transcript(
        "broken",
        "minimax",
        "<minimax:tool_call>\n<invoke nam",
        "<minimax:tool_call>\n<invoke nam",
    ),
    Transcript(
        "two calls",
        "deepseek_v32",
        "Hm.\n\n<｜DSML｜function_calls>\n"
        f"{_named('｜DSML｜', 'edit-file', _RAW)}{_named('｜DSML｜', 'now', {})}"
        "</｜DSML｜function_calls>",
        "Hm.",
        BOTH,
    ),
    Transcript(
        "types",
        "deepseek_v4",
        f"<｜DSML｜tool_calls>{_named('｜DSML｜', 'edit-file', _TYPED)}</｜DSML｜tool_calls>",
        calls=(_TYPED_CALL,),
    ),
    Transcript(
        "call",
        "seed",
        "<seed:tool_call>\n<function=edit-file>\n<parameter=path>Paris</parameter>\n</function>\n"
        "</seed:tool_call>",
        calls=(PARIS,),
    ),
    Transcript(
        "call",
        "longcat",
        "<longcat_tool_call>edit-file\n<longcat_arg_key>path</longcat_arg_key>\n"
        "<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>",
        calls=(PARIS,),
    ),
]
