"""Tools of a request as the model sees them, and the way back from a call to the client's tool.

A model knows functions with one flat name each. So tools of a namespace get a joined name, and a
custom tool, whose input is free text, becomes a function with one string argument.
"""

import dataclasses
from typing import Any, Literal, TypeVar

from msgspec import Struct

from services.gateway.conversation.constraint import Constraint
from services.gateway.conversation.conversation import Tool
from services.gateway.dialects.responses.request_types import OFFERED_TOOLS_MAX
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported

CUSTOM_ARGUMENT = "input"
"""Name of a custom tool's only argument, as the model sees it."""
TOOL_SEARCH = "tool_search"
"""Name of the function with which the model asks the client for further tools."""

Kind = Literal["function", "custom", "tool_search"]
K = TypeVar("K", bound=Struct)


class FunctionFields(Struct):
    """A tool of the type `function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class CustomFields(Struct):
    """A tool of the type `custom`, whose input is text."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    defer_loading: bool | None = None


class NamespaceFields(Struct):
    """Several tools under one name, for example those of an MCP server."""

    name: str
    tools: list[Any]
    description: str | None = None


class SearchFields(Struct):
    """The tool `tool_search`."""

    description: str | None = None
    parameters: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The client's own tool that a function of the model stands for."""

    kind: Kind
    name: str
    """Name of the tool at the client, without its namespace."""
    namespace: str | None = None


class Toolbox:
    """All tools that a model may call in one response, by the names that the model knows."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        """Tools that are shown to the model from the start."""
        self.deferred: list[Tool] = []
        """Tools that the model may call too, but which only messages mention."""
        self.ignored: dict[str, None] = {}
        """Names of left out tools, such as `tools.web_search`, a set in order."""
        self._origins: dict[str, Origin] = {}
        self._bare: dict[str, set[str]] = {}
        """Joined names of the tools that have this name in some namespace."""

    def read(self, tools: list[Any], param: str, *, are_found: bool = False) -> list[Tool]:
        """Add tools as a request lists them; return all of them as the model sees them.

        Those marked `defer_loading` may be called, but are not part of `tools`.

        Args:
            tools: the tools, as their JSON was parsed.
            param: path of the request field with the list, for errors.
            are_found: a search has found them: all are deferred, and known ones not added again.

        Raises:
            ApiError: 400 for a tool that is not valid, and for too many.
        """
        found: list[Tool] = []
        for index, tool in enumerate(tools):
            found += self._read(tool, f"{param}[{index}]", None, is_found=are_found)
        return found

    def keep_only(self, names: set[str], namespaces: set[str]) -> None:
        """Show only these tools to the model.

        Args:
            names: joined names of tools.
            namespaces: names of namespaces, of which all tools stay.
        """
        self.tools = [
            tool
            for tool in self.tools
            if tool.name in names or self._origins[tool.name].namespace in namespaces
        ]

    def origin(self, name: str) -> Origin:
        """Return the client's tool that the model calls by `name`.

        Models also write a namespace with a dot, or leave it out. A name that fits no tool is
        returned as it is: the client tells the model that there is no such tool.
        """
        if (found := self._origins.get(name)) is not None:
            return found
        candidates = self._bare.get(name, set())
        if len(candidates) == 1:
            return self._origins[next(iter(candidates))]
        namespace, _, rest = name.rpartition(".")
        known = self._origins.get(joined_name(rest, namespace)) or self._origins.get(rest)
        return known or Origin("function", name)

    def _read(self, tool: Any, param: str, namespace: str | None, *, is_found: bool) -> list[Tool]:
        kind = _kind_of(tool, param)
        schema_param = f"{param}.parameters"
        match kind:
            case "function":
                given = request_body.convert(tool, FunctionFields, param)
                request_body.check_depth(given.parameters, schema_param)
                shown = Tool(
                    joined_name(given.name, namespace),
                    given.description,
                    given.parameters,
                    is_strict=bool(given.strict),
                    param=schema_param,
                )
                origin = Origin("function", given.name, namespace)
                is_deferred = bool(given.defer_loading)
            case "custom":
                custom = request_body.convert(tool, CustomFields, param)
                shown = _custom_tool(joined_name(custom.name, namespace), custom, param)
                origin = Origin("custom", custom.name, namespace)
                is_deferred = bool(custom.defer_loading)
            case "namespace" if namespace is None:
                return self._read_namespace(tool, param, is_found=is_found)
            case "tool_search" if tool.get("execution") == "client":
                search = request_body.convert(tool, SearchFields, param)
                request_body.check_depth(search.parameters, schema_param)
                name = joined_name(TOOL_SEARCH, namespace)
                shown = Tool(name, search.description, search.parameters, param=schema_param)
                origin = Origin("tool_search", TOOL_SEARCH, namespace)
                is_deferred = False
            case _:
                self.ignored[f"tools.{kind}"] = None
                return []
        if not origin.name or len(origin.name) > 256:
            raise invalid_field(f"{param}.name", "a name has 1 to 256 characters.")
        self._add(shown, origin, is_deferred=is_deferred, is_found=is_found)
        return [shown]

    def _read_namespace(self, tool: Any, param: str, *, is_found: bool) -> list[Tool]:
        given = request_body.convert(tool, NamespaceFields, param)
        known = len(self.tools)
        found: list[Tool] = []
        for index, inner in enumerate(given.tools):
            found += self._read(inner, f"{param}.tools[{index}]", given.name, is_found=is_found)
        if given.description and len(self.tools) > known:
            # No template has a place for it, so it stands before the first tool's description.
            first = self.tools[known]
            text = "\n\n".join(filter(None, (given.description, first.description)))
            self.tools[known] = dataclasses.replace(first, description=text)
        return found

    def _add(self, tool: Tool, origin: Origin, *, is_deferred: bool, is_found: bool) -> None:
        if is_found and self._origins.get(tool.name) == origin:
            return
        if len(self.tools) + len(self.deferred) == OFFERED_TOOLS_MAX:
            problem = (
                f"at most {OFFERED_TOOLS_MAX} are allowed, those that a search found included."
            )
            raise invalid_field("tools", problem)
        self._origins[tool.name] = origin
        if origin.namespace is not None:
            self._bare.setdefault(origin.name, set()).add(tool.name)
        (self.deferred if is_deferred or is_found else self.tools).append(tool)


def joined_name(name: str, namespace: object) -> str:
    """Return the name by which the model knows a tool of the client.

    Args:
        name: the tool's own name.
        namespace: its namespace; a value that is no text counts as none.
    """
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _kind_of(tool: Any, param: str) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise invalid_field(param, "a tool is an object with a type.")
    return kind[:64]


def _custom_tool(name: str, custom: CustomFields, param: str) -> Tool:
    format_ = custom.format or {"type": "text"}
    description = custom.description or ""
    form: Constraint | None = None
    match format_:
        case {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            description += f"\n\nThe input must match this {syntax} grammar:\n{definition}"
            if syntax in ("lark", "regex"):
                kind: Literal["lark", "regex"] = "lark" if syntax == "lark" else "regex"
                form = Constraint(kind, definition, f"{param}.format.definition")
        case _:
            raise unsupported(
                f"{param}.format", "only text, and grammar with syntax and definition."
            )
    argument = {"type": "string", "description": "The whole input as plain text."}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: argument},
        "required": [CUSTOM_ARGUMENT],
    }
    return Tool(name, description.strip() or None, parameters, text_form=form)
