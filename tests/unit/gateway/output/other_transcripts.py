"""Transcripts of Python calls, lists and Gemma's objects, with and without markers."""

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from tests.unit.gateway.output.transcript import (
    BOTH,
    EDIT,
    EDIT_CALL,
    HARD_TEXT,
    NOW,
    PARIS,
    Transcript,
    as_json,
)

BARE = [
    Transcript(
        "bare object",
        "llama3",
        f' {{"name": "edit-file", "parameters": {as_json(EDIT)}}}',
        calls=(EDIT_CALL,),
    ),
    Transcript(
        "marker",
        "llama3",
        '<|python_tag|>{"type": "function", "name": "edit-file", '
        f'"parameters": {as_json(EDIT)}}}; '
        '{"name": "now", "parameters": {}}',
        calls=BOTH,
    ),
    Transcript(
        "unknown tool",
        "llama3",
        '{"name": "x", "parameters": {}}',
        '{"name": "x", "parameters": {}}',
    ),
    Transcript("other object", "llama3", '{"a": [1, "b"]} ', '{"a": [1, "b"]} '),
    Transcript(
        "later object",
        "llama3",
        'So: {"name": "now", "parameters": {}}',
        'So: {"name": "now", "parameters": {}}',
    ),
    Transcript(
        "two calls",
        "pythonic",
        f"[edit-file(path='a.py', text={HARD_TEXT!r}, line=3, force=True, owner=None), now()]",
        calls=BOTH,
    ),
    Transcript("list", "pythonic", "[1, 2] is a list", "[1, 2] is a list"),
    Transcript(
        "two calls",
        "lfm2",
        f'<|tool_call_start|>[edit-file(path="a.py", text={as_json(HARD_TEXT)}, line=3, '
        "force=true, owner=null), now()]<|tool_call_end|>Done.",
        "Done.",
        BOTH,
    ),
    Transcript(
        "positions and lists",
        "lfm2",
        "<|tool_call_start|>[edit-file('a', ranges=[1, (2, 3)], options={'b': {\"c\": None}})]"
        "<|tool_call_end|>",
        calls=(("edit-file", {"path": "a", "ranges": [1, [2, 3]], "options": {"b": {"c": None}}}),),
    ),
    Transcript(
        "broken arguments",
        "lfm2",
        '<|tool_call_start|>[edit-file(path="a", oops oops)]<|tool_call_end|>!',
        "!",
        (("edit-file", {"path": "a", "text": "oops", INVALID_ARGUMENTS: "oops)]"}),),
    ),
    Transcript(
        "broken arguments",
        "llama3",
        '{"name": "edit-file", "parameters": {"path": Paris}}',
        calls=(("edit-file", {"path": None, INVALID_ARGUMENTS: "Paris}}"}),),
    ),
    Transcript(
        "lines",
        "olmo3",
        '<function_calls>\nedit-file(path="Paris")\nnow()\n</function_calls>',
        calls=(PARIS, NOW),
    ),
]
OTHERS = [
    Transcript(
        "two calls",
        "gemma4",
        f'<|tool_call>call:edit-file{{force:true,line:3,owner:null,path:<|"|>a.py<|"|>,'
        f'text:<|"|>{HARD_TEXT}<|"|>}}<tool_call|><|tool_call>call:now{{}}<tool_call|>',
        calls=BOTH,
    ),
    Transcript(
        "nested",
        "gemma4",
        '<|tool_call>call:edit-file{options:{a:[1,<|"|>x<|"|>],<|"|>b c<|"|>:{}},path:<|"|>3<|"|>}'
        "<tool_call|>.",
        ".",
        (("edit-file", {"options": {"a": [1, "x"], "b c": {}}, "path": "3"}),),
    ),
    Transcript(
        "broken arguments",
        "gemma4",
        '<|tool_call>call:edit-file{path:<|"|>a<|"|>,oops}<tool_call|>!',
        "!",
        (("edit-file", {"path": "a", INVALID_ARGUMENTS: "oops}"}),),
    ),
    Transcript("broken", "gemma4", "<|tool_call>call it", "<|tool_call>call it"),
    Transcript(
        "call",
        "function_gemma",
        f"<start_function_call>call:edit-file{{text:<escape>{HARD_TEXT}<escape>,line:3,path:Paris}}"
        "<end_function_call>",
        calls=(("edit-file", {"text": HARD_TEXT, "line": 3, "path": "Paris"}),),
    ),
    Transcript(
        "list",
        "granite3",
        f'<|tool_call|>[{{"name": "edit-file", "arguments": {as_json(EDIT)}}}, '
        '{"name": "now", "arguments": {}}]',
        calls=BOTH,
    ),
    Transcript(
        "tags",
        "granite3",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call> Done.',
        " Done.",
        (NOW,),
    ),
    Transcript(
        "list",
        "nemotron",
        f'<TOOLCALL>[{{"name": "edit-file", "arguments": {as_json(EDIT)}}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        calls=BOTH,
    ),
    Transcript(
        "list",
        "phi4",
        '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
        calls=(NOW,),
    ),
    Transcript(
        "list",
        "command",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]'
        "<|END_ACTION|>",
        calls=(NOW,),
    ),
    Transcript(
        "list",
        "jamba",
        '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
        calls=(NOW,),
    ),
    Transcript(
        "call", "llama4", '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>',
        calls=(NOW,),
    ),
]  # fmt: skip
