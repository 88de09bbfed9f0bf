# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Transcripts of families whose arguments are JSON."""

from typing import Any

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from tests.unit.gateway.output.transcript import (
    BOTH,
    CLOSERS,
    CLOSERS_CALL,
    EDIT,
    EDIT_CALL,
    NOW,
    Transcript,
    as_json,
    hermes_call,
)


def _kimi(name: str, number: int, arguments: Any) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{as_json(arguments)}<|tool_call_end|>"
    )


HERMES = [
    Transcript("one call", "hermes", hermes_call("edit-file", EDIT), calls=(EDIT_CALL,)),
    Transcript(
        "text around",
        "hermes",
        f"Let me see.\n{hermes_call('edit-file', EDIT)}\n{hermes_call('now', {})} done",
        "Let me see. done",
        BOTH,
    ),
    Transcript("no call", "hermes", "a < b and <tool> \n", "a < b and <tool> \n"),
    Transcript(
        "end in value", "hermes", hermes_call("edit-file", {"text": CLOSERS}), calls=(CLOSERS_CALL,)
    ),
    Transcript(
        "no JSON",
        "hermes",
        "x \n<tool_call>{oops</tool_call>!",
        "x \n<tool_call>{oops</tool_call>!",
    ),
    Transcript("list", "hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>"),
    Transcript("no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', calls=(NOW,)),
    Transcript(
        "null arguments",
        "hermes",
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        calls=(NOW,),
    ),
    Transcript(
        "arguments as text",
        "hermes",
        f'<tool_call>{{"name": "edit-file", "arguments": {as_json(as_json(EDIT))}}}</tool_call>',
        calls=(EDIT_CALL,),
    ),
    Transcript(
        "arguments first",
        "hermes",
        f'<tool_call>{{"arguments": {as_json(EDIT)}, "id": "x", "name": "edit-file"}}</tool_call>',
        calls=(EDIT_CALL,),
    ),
    Transcript(
        "missing and extra brackets",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}\n</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>',
        calls=(NOW, NOW),
    ),
    Transcript(
        "raw line end and wrong escape",
        "hermes",
        '<tool_call>{"name": "edit-file", "arguments": {"text": "a\nb\\d", "force": True}}'
        "</tool_call>",
        calls=(("edit-file", {"text": "a\nb\\d", "force": True}),),
    ),
    Transcript(
        "broken arguments",
        "hermes",
        '<tool_call>{"name": "edit-file", "arguments": {"text": "say "hi" now"}}</tool_call>!',
        "!",
        (("edit-file", {"text": "say ", INVALID_ARGUMENTS: 'hi" now"}}'}),),
    ),
    Transcript(
        "unquoted argument",
        "hermes",
        '<tool_call>{"name": "edit-file", "arguments": {"path": a.py}}</tool_call>',
        calls=(("edit-file", {"path": None, INVALID_ARGUMENTS: "a.py}}"}),),
    ),
    Transcript(
        "arguments in a list",
        "hermes",
        '<tool_call>{"name": "now", "arguments": ["a"]}</tool_call>',
        calls=(("now", {INVALID_ARGUMENTS: '["a"]'}),),
    ),
    Transcript(
        "text in place of arguments",
        "hermes",
        '<tool_call>{"name": "now", "arguments": "at \\"once\\""}</tool_call>',
        calls=(("now", {INVALID_ARGUMENTS: 'at "once"'}),),
    ),
    Transcript(
        "wrong brackets",
        "hermes",
        '<tool_call>{"name": "edit-file", "arguments": {"ranges": [1, {"a": 2]}}</tool_call>',
        calls=(("edit-file", {"ranges": [1, {"a": 2}], INVALID_ARGUMENTS: "]}}"}),),
    ),
    Transcript(
        "commas too many",
        "hermes",
        '<tool_call>{"name": "edit-file", "arguments": {"ranges": [1, ], }}</tool_call>',
        calls=(("edit-file", {"ranges": [1]}),),
    ),
    Transcript(
        "text without end",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {} and so on',
        "and so on",
        (NOW,),
    ),
    Transcript(
        "cut off",
        "hermes",
        'x <tool_call>{"name": "edit-file", "arguments": {"path": "a',
        "x",
        (("edit-file", {}),),
        is_cut=True,
    ),
    Transcript(
        "cut off before", "hermes", 'x <tool_call>{"name": "ed', 'x <tool_call>{"name": "ed'
    ),
]
HEADERS = [
    Transcript(
        "two calls",
        "kimi_k2",
        f"Ok.<|tool_calls_section_begin|>{_kimi('edit-file', 0, EDIT)}{_kimi('now', 1, {})}"
        "<|tool_calls_section_end|>",
        "Ok.",
        BOTH,
    ),
    Transcript("without section", "kimi_k2", _kimi("now", 0, {}), calls=(NOW,)),
    Transcript(
        "broken arguments",
        "kimi_k2",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{oops<|tool_call_end|>!",
        "!",
        (("now", {INVALID_ARGUMENTS: "oops"}),),
    ),
    Transcript(
        "broken", "kimi_k2", "<|tool_call_begin|>no name here", "<|tool_call_begin|>no name here"
    ),
    Transcript(
        "version 3",
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit-file\n"
        f"```json\n{as_json(EDIT)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=BOTH,
    ),
    Transcript(
        "version 3.1",
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit-file<｜tool▁sep｜>"
        f"{as_json(EDIT)}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        BOTH,
    ),
    Transcript(
        "new",
        "mistral",
        f"[TOOL_CALLS]edit-file[ARGS]{as_json(EDIT)}[TOOL_CALLS]now[ARGS]{{}}",
        calls=BOTH,
    ),
    Transcript("with id", "mistral", "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}", calls=(NOW,)),
    Transcript(
        "old",
        "mistral",
        f'[TOOL_CALLS] [{{"name": "edit-file", "arguments": {as_json(EDIT)}}}, '
        '{"name": "now", "arguments": {}, "id": "abcDEF123"}]',
        calls=BOTH,
    ),
    Transcript(
        "broken arguments",
        "deepseek_v3",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[1, oops]<｜tool▁call▁end｜>!",
        "!",
        (("now", {INVALID_ARGUMENTS: "[1, oops]"}),),
    ),
    Transcript(
        "broken arguments before another call",
        "mistral",
        '[TOOL_CALLS]edit-file[ARGS]{"path": Paris}[TOOL_CALLS]now[ARGS]{}',
        calls=(("edit-file", {"path": None, INVALID_ARGUMENTS: "Paris}"}), NOW),
    ),
    Transcript("broken", "mistral", "[TOOL_CALLS] are nice", "[TOOL_CALLS] are nice"),
]
