"""Tools as the model sees them, and calls back to the client's tools."""

import time
from typing import Any

import pytest

from services.gateway.dialects.responses.items import ItemReader
from services.gateway.dialects.responses.request_types import OFFERED_TOOLS_MAX
from services.gateway.dialects.responses.tools import Origin, Toolbox
from services.gateway.http.errors import ApiError

FUNCTION = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    "strict": False,
}
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    """Return a namespace of tools."""
    return {"type": "namespace", "name": name, "description": "About it.", "tools": list(tools)}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    """Return a function without parameters."""
    return {"type": "function", "name": name, **fields}


def test_namespaced_tool_has_joined_name_and_call_finds_both_parts() -> None:
    """A tool of a namespace is offered under one name, and a call is split again."""
    box = Toolbox()
    box.read([FUNCTION, namespace("agents", tool("spawn")), namespace("mcp__x__", tool("go"))], "t")
    assert [one.name for one in box.tools] == ["exec_command", "agents__spawn", "mcp__x__go"]
    assert box.tools[1].description == "About it."
    assert box.origin("agents__spawn") == Origin("function", "spawn", "agents")
    assert box.origin("mcp__x__go") == Origin("function", "go", "mcp__x__")
    assert box.origin("exec_command") == Origin("function", "exec_command")


@pytest.mark.parametrize("name", ["spawn", "agents.spawn", "agents__spawn"])
def test_call_without_namespace_or_with_dot_finds_the_only_tool(name: str) -> None:
    """Models write namespaces in several ways; a clear one is understood."""
    box = Toolbox()
    box.read([namespace("agents", tool("spawn"))], "tools")
    assert box.origin(name) == Origin("function", "spawn", "agents")


def test_unclear_or_unknown_name_is_returned_as_it_is() -> None:
    """A name of two namespaces, or of no tool, is the client's to answer."""
    box = Toolbox()
    box.read([namespace("a", tool("go")), namespace("b", tool("go"))], "tools")
    assert box.origin("go") == Origin("function", "go")
    assert box.origin("other") == Origin("function", "other")


def test_custom_tool_becomes_function_with_one_string_and_its_grammar() -> None:
    """The model sees a function with one argument, and reads the grammar in its description."""
    box = Toolbox()
    [shown] = box.read([APPLY_PATCH], "tools")
    assert shown.parameters is not None
    assert list(shown.parameters["properties"]) == ["input"]
    assert shown.description is not None
    assert "start: /.+/" in shown.description
    assert box.origin("apply_patch").kind == "custom"


def test_unknown_tool_types_are_left_out_and_named_once() -> None:
    """A server that cannot search the web still serves the request."""
    box = Toolbox()
    box.read([{"type": "web_search"}, {"type": "web_search"}, {"type": "x"}, FUNCTION], "tools")
    assert list(box.ignored) == ["tools.web_search", "tools.x"]
    assert [one.name for one in box.tools] == ["exec_command"]


def test_many_kinds_of_tools_and_items_are_read_in_linear_time() -> None:
    """Requests of this size are read on the event loop, where every other request waits."""
    kinds = [{"type": f"kind{number}"} for number in range(30_000)]
    box = Toolbox()
    reader = ItemReader(box)
    started_s = time.process_time()
    box.read(kinds, "tools")
    reader.read(kinds, lambda _: "input")
    assert len(box.ignored) == len(reader.ignored) == 30_000
    assert time.process_time() - started_s < 2.0


def test_tools_are_refused_at_the_first_that_is_too_many() -> None:
    """A list of a hundred thousand tools is not read to its end only to be refused."""
    box = Toolbox()
    with pytest.raises(ApiError, match="at most 1024"):
        box.read([namespace("n", *(tool(f"t{n}") for n in range(5_000)))], "tools")
    assert len(box.tools) == OFFERED_TOOLS_MAX
    same = Toolbox()
    with pytest.raises(ApiError, match="at most 1024"):
        same.read([tool("same")] * 5_000, "tools")
    assert len(same.tools) == OFFERED_TOOLS_MAX


def test_allowed_tools_name_tools_and_whole_namespaces() -> None:
    """What a choice allows is shown to the model, the rest is not."""
    box = Toolbox()
    box.read([FUNCTION, namespace("a", tool("x"), tool("y")), namespace("b", tool("z"))], "tools")
    box.keep_only({"b__z", "unknown"}, {"a"})
    assert [one.name for one in box.tools] == ["a__x", "a__y", "b__z"]


def test_deferred_tools_may_be_called_but_are_not_shown() -> None:
    """A tool that the client defers is no part of the prompt, so the prompt stays the same."""
    box = Toolbox()
    box.read([FUNCTION, namespace("n", tool("later", defer_loading=True))], "tools")
    assert [one.name for one in box.tools] == ["exec_command"]
    assert [one.name for one in box.deferred] == ["n__later"]
    assert box.origin("n__later").namespace == "n"


def test_tool_that_a_search_finds_again_is_not_added_again() -> None:
    """Every later request repeats what a search has found; it is the same tool."""
    box = Toolbox()
    box.read([FUNCTION], "tools")
    for _ in range(2):
        found = box.read([FUNCTION, tool("later")], "input[3].tools", are_found=True)
        assert [one.name for one in found] == ["exec_command", "later"]
    assert [one.name for one in box.tools] == ["exec_command"]
    assert [one.name for one in box.deferred] == ["later"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["text"], "tools[0]"),
        ([{"type": "function"}], "tools[0].name"),
        ([{**APPLY_PATCH, "format": {"type": "other"}}], "tools[0].format"),
        ([tool("")], "tools[0].name"),
        ([namespace("n", {"type": "function", "name": 5})], "tools[0].tools[0].name"),
    ],
)
def test_invalid_tools_are_refused_by_their_path(tools: list[Any], param: str) -> None:
    """A tool that is not valid is a 400 that names its place."""
    with pytest.raises(ApiError) as refused:
        Toolbox().read(tools, "tools")
    assert refused.value.status == 400
    assert refused.value.param == param
