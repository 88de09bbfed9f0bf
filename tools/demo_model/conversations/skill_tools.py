"""Skill of calling an offered tool, and of reporting its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.demo_model.conversations.chat import Chat, Message, Tool, as_json
from tools.demo_model.conversations.skill_json import random_key, random_object
from tools.demo_model.conversations.tool_catalog import CATALOG, Entry
from tools.demo_model.conversations.words import TextSource

ACTIONS = """get set find list send create delete update read write open close start stop check
count add remove search fetch move copy save load""".split()

CALL_FORMS = (
    "Call {tool} with {pairs}.",
    "Call the tool {tool} with {pairs}.",
    "Use {tool} with {pairs}.",
    "Use the tool {tool} with {pairs}",
    "Please call {tool} with {pairs}.",
    "Run {tool} with {pairs}.",
    "I need {tool} with {pairs}.",
)

MAKERS: dict[str, Callable[[TextSource], Any]] = {
    "city": TextSource.city,
    "name": TextSource.name,
    "noun": TextSource.noun,
    "count": lambda source: source.integer(1, 60),
    "number": lambda source: int(source.digits(1, 5)),
    "text": lambda source: " ".join(source.noun() for _ in range(source.integer(2, 6))),
    "sentence": lambda source: source.sentence()[:-1],
    "id": lambda source: source.letters(4, 9),
    "flag": lambda source: source.chance(0.5),
}
JSON_TYPES = {"count": "integer", "number": "integer", "flag": "boolean"}


@dataclass(frozen=True)
class ToolCase:
    """A tool, and a request that it serves."""

    tool: Tool
    """The tool in the form of the OpenAI API."""
    request: str
    """Words of the user."""
    arguments: dict[str, Any]
    """Arguments of the call that serves the request."""

    @property
    def name(self) -> str:
        """Return the name of the tool."""
        return str(self.tool["function"]["name"])


def _schema(
    source: TextSource, name: str, about: str, types: dict[str, str], optional: list[str]
) -> Tool:
    """Return a tool in the form of the OpenAI API."""
    spoken = source.chance(0.3)
    properties: dict[str, Any] = {}
    for key, json_type in types.items():
        properties[key] = {"type": json_type}
        if spoken:
            words = source.rng.choice(("The " + key.replace("_", " "), source.sentence()))
            properties[key]["description"] = words
        if key in optional and source.chance(0.5):
            properties[key]["enum"] = [source.noun() for _ in range(source.integer(2, 3))]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if source.chance(0.8):
        parameters["required"] = [key for key in types if key not in optional]
    if source.chance(0.1):
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if source.chance(0.85):
        function["description"] = about if source.chance(0.9) else source.sentence()
    function["parameters"] = parameters
    if source.chance(0.1):
        function["strict"] = True
    return {"type": "function", "function": function}


def catalog_case(source: TextSource, entry: Entry) -> ToolCase:
    """Return a tool of the catalog with random names of arguments, and a request for it."""
    keys = {slot: source.rng.choice(names) for slot, (names, _) in entry.slots.items()}
    values = {slot: MAKERS[kind](source) for slot, (_, kind) in entry.slots.items()}
    types = {keys[slot]: JSON_TYPES.get(kind, "string") for slot, (_, kind) in entry.slots.items()}
    optional = []
    if source.chance(0.2):  # an argument that the request does not name, so the call leaves it out
        extra = source.rng.choice(("unit", "language", "limit", "format"))
        if extra not in types:
            types[extra] = "string"
            optional.append(extra)
    request = source.rng.choice(entry.requests).format(**values)
    tool = _schema(source, source.rng.choice(entry.names), entry.about, types, optional)
    return ToolCase(tool, request, {keys[slot]: values[slot] for slot in entry.slots})


def _spoken_pairs(source: TextSource, arguments: dict[str, Any]) -> str:
    joint = source.rng.choice((" ", " ", " = ", "=", ": ", " set to "))
    quote = source.chance(0.5)
    pairs = []
    for key, value in arguments.items():
        bare = isinstance(value, str) and not quote
        pairs.append(key + joint + (value if bare else as_json(value)))
    return pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + " and " + pairs[-1]


def invented_case(source: TextSource) -> ToolCase:
    """Return a tool with a random name and arguments, and a request that names both."""
    name = f"{source.rng.choice(ACTIONS)}_{source.noun()}"
    kinds = {
        random_key(source): source.rng.choice(tuple(MAKERS)) for _ in range(source.integer(0, 4))
    }
    types = {key: JSON_TYPES.get(kind, "string") for key, kind in kinds.items()}
    arguments = {key: MAKERS[kind](source) for key, kind in kinds.items()}
    tool = _schema(source, name, name.replace("_", " ").capitalize() + ".", types, [])
    form = source.rng.choice(CALL_FORMS)
    if not arguments:
        return ToolCase(tool, form.format(tool=name, pairs="").replace(" with ", ""), arguments)
    return ToolCase(tool, form.format(tool=name, pairs=_spoken_pairs(source, arguments)), arguments)


def random_case(source: TextSource) -> ToolCase:
    """Return a random tool, of the catalog or invented, and a request for it."""
    if source.chance(0.4):
        return invented_case(source)
    return catalog_case(source, source.rng.choice(CATALOG))


def other_tools(source: TextSource, taken: set[str], most: int) -> list[Tool]:
    """Return random tools to offer besides those that a request needs.

    Args:
        source: random numbers and texts.
        taken: names that no tool may have; the names of the new tools are added.
        most: largest number of tools.
    """
    tools: list[Tool] = []
    for _ in range(source.integer(0, most)):
        entry = source.rng.choice(CATALOG)
        case = invented_case(source) if source.chance(0.4) else catalog_case(source, entry)
        names = set(entry.names) if case.name in entry.names else {case.name}
        if not names & taken:
            taken |= names
            tools.append(case.tool)
    return tools


def tool_family(name: str) -> set[str]:
    """Return all names of the catalog's tool that has this name; for others the name alone."""
    for entry in CATALOG:
        if name in entry.names:
            return set(entry.names)
    return {name}


def _call(case: ToolCase) -> Message:
    return {"type": "function", "function": {"name": case.name, "arguments": case.arguments}}


def _result(source: TextSource) -> tuple[str, str]:
    """Return a tool's result and the model's report of it."""
    form = source.integer(0, 9)
    if form < 6:
        value = random_object(source, 3)
        told = ", ".join(
            f"{key} is {item if isinstance(item, str) else as_json(item)}"
            for key, item in value.items()
        )
        return as_json(value), told + "."
    if form == 6:
        text = source.digits()
    elif form == 7:
        text = source.noun()
    else:
        text = source.sentence()[:-1]
    return text, text + "."


def tool_chat(source: TextSource, most_others: int = 3) -> Chat:
    """Return a request, the tool call that answers it and, in half of all cases, the result.

    The model's report follows the result.

    Args:
        source: random numbers and texts.
        most_others: largest number of other tools that are offered.
    """
    cases = [random_case(source)]
    taken = tool_family(cases[0].name)
    request = cases[0].request
    if source.chance(0.08):  # two calls in one answer
        second = random_case(source)
        if second.name not in taken:
            taken |= tool_family(second.name)
            cases.append(second)
            request = f"{request} {second.request}"
    tools = [case.tool for case in cases] + other_tools(source, taken, most_others)
    source.rng.shuffle(tools)
    messages: list[Message] = [
        {"role": "user", "content": request},
        {"role": "assistant", "content": "", "tool_calls": [_call(case) for case in cases]},
    ]
    if source.chance(0.5):
        told = []
        for case in cases:
            content, words = _result(source)
            messages.append({"role": "tool", "content": content})
            told.append(f"The tool {case.name} says: {words}")
        messages.append({"role": "assistant", "content": " ".join(told)})
        return Chat(messages, tools, task="tool_result")
    return Chat(messages, tools, task="tool")
