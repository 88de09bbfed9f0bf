"""Depth of grammars. Owns how many levels llguidance descends at most while it compiles one.

The library calls itself for each rule that a rule names and each part of a schema that a reference
names, and ends the process when the stack is full. So the levels are counted before, from above:
rules that name each other in a circle count as if each named the next.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import orjson

from shared.errors import Refusal

_LEXEME = re.compile(
    r"""
    (?P<space>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<skipped>%(?:ignore|import|override|declare|if|lark)
        |"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<[^<>\s]+>|@[a-zA-Z0-9_-]+
        |0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|::)
    |(?P<line>(?:\r?\n)+)
    |(?P<json>%(?:json|regex|llguidance)\s*)
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    |(?P<mark>.)
    """,
    re.VERBOSE,
)
"""Lexemes of Lark as llguidance reads it. Texts that it refuses may be read in any way."""
_IDS = ("$id", "$anchor", "$dynamicAnchor")
"""Keywords by which references get another meaning than that of a path in the schema."""


class _Graph:
    """Parts that are compiled once each, and which of them name which."""

    def __init__(self) -> None:
        self.levels: list[int] = []
        """Levels within each part; a name has none."""
        self._following: list[list[int]] = []
        self._names: dict[str, int] = {}

    def add(self, levels: int) -> int:
        """Add a part and return its number."""
        self.levels.append(levels)
        self._following.append([])
        return len(self.levels) - 1

    def define_all(self, names: Iterable[str], part: int) -> None:
        """Note that names may mean a part."""
        for name in names:
            self._following[self._number(name)].append(part)

    def link_all(self, part: int, names: Iterable[str]) -> None:
        """Note that a part may name what names mean."""
        self._following[part] += map(self._number, names)

    def deepest(self) -> int:
        """Return the most levels on a way through the graph; all of a circle lie on one way.

        Source: Tarjan, "Depth-First Search and Linear Graph Algorithms", SIAM Journal on Computing,
        1972. It completes circles in an order in which all that they lead to is complete.
        """
        order: dict[int, int] = {}
        lowest: dict[int, int] = {}
        total: dict[int, int] = {}
        waiting: list[int] = []
        for root in range(len(self.levels)):
            way = [] if root in order else [(root, iter(self._following[root]))]
            while way:
                node, rest = way[-1]
                if node not in order:
                    order[node] = lowest[node] = len(order)
                    waiting.append(node)
                following = next((one for one in rest if one not in total), None)
                if following is None:
                    way.pop()
                    if way:
                        parent = way[-1][0]
                        lowest[parent] = min(lowest[parent], lowest[node])
                    if lowest[node] == order[node]:
                        self._complete(node, waiting, total)
                elif following in order:
                    lowest[node] = min(lowest[node], order[following])
                else:
                    way.append((following, iter(self._following[following])))
        return max(total.values())

    def _complete(self, node: int, waiting: list[int], total: dict[int, int]) -> None:
        """Note the levels from the nodes of a circle on, of which `node` was found first."""
        circle = [waiting.pop()]
        while circle[-1] != node:
            circle.append(waiting.pop())
        beyond = [total[one] for part in circle for one in self._following[part] if one in total]
        levels = sum(self.levels[part] for part in circle) + max(beyond, default=0)
        total |= dict.fromkeys(circle, levels)

    def _number(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = self.add(0)
        return self._names[name]


def count_levels(text: str) -> int:
    """Return how many levels the library descends at most while it compiles a grammar.

    Takes milliseconds; the result is a function of the text, so all ranks find the same.

    Args:
        text: the grammar, in llguidance's JSON or in Lark.

    Raises:
        Refusal: the text is JSON that the library cannot read; its text is a clause.
    """
    if not text.lstrip().startswith("{"):
        return _lark_levels(text)
    try:
        content = orjson.loads(text)
    except ValueError as error:
        raise Refusal(f"it is not valid JSON ({error})") from None
    grammars = content.get("grammars")
    levels = [1]
    for grammar in grammars if isinstance(grammars, list) else ():
        if isinstance(grammar, dict):
            levels.append(_schema_levels(grammar.get("json_schema")))
            levels.append(_lark_levels(str(grammar.get("lark_grammar") or "")))
    return max(levels)


def _lark_levels(text: str) -> int:
    """Return the levels of rules, terminals and groups; nested grammars count as if in place."""
    graph = _Graph()
    part = graph.add(1)
    names: list[str] = []
    """Read since the line or the definition began."""
    begins_item = True
    """A name that follows is the first of its line."""
    is_head = False
    """The names are those of a definition, if a colon follows, and of no other."""
    depth = place = schema_levels = 0
    while (lexeme := _LEXEME.match(text, place)) is not None:
        place = lexeme.end()
        match lexeme.lastgroup, lexeme.group():
            case "space", _:
                continue
            case "line", _:
                graph.link_all(part, names)
                names, begins_item, is_head = [], True, False
                continue
            case "name", name:
                names.append(name.lstrip("!?"))
                is_head = is_head or begins_item
            case "json", _:
                value, place = _json_at(text, place)
                schema_levels = max(schema_levels, _schema_levels(value))
            case "mark", "(" | "[" | "{":
                depth += 1
                graph.levels[part] = max(graph.levels[part], depth + 1)
            case "mark", ")" | "]" | "}":
                depth = max(0, depth - 1)
            case "mark", ":" if names:
                # Attributes have names too: any of them may be the one that is defined.
                if not is_head:
                    graph.link_all(part, names)
                part = graph.add(1)
                graph.define_all(names, part)
                graph.link_all(part, names)
                names, is_head = [], False
        begins_item = False
    graph.link_all(part, names)
    return max(graph.deepest(), schema_levels)


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """Return a JSON value in a text, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"a part of it is not valid JSON ({error})") from None


def _schema_levels(schema: Any) -> int:
    """Return the levels of a schema and of all that its references name."""
    levels, references = _measure(schema)
    graph = _Graph()
    whole = graph.add(levels)
    has_other_bases = bool(references) and _has_other_bases(schema)
    for name in set(references):
        found = () if has_other_bases else _resolve(schema, name)
        if not found:
            # Each place may mean another part, which may be as deep as the whole.
            return levels * (1 + len(references))
        inner_levels, inner = _measure(found[0])
        part = graph.add(inner_levels)
        graph.define_all([name], part)
        graph.link_all(whole, [name])
        graph.link_all(part, set(inner))
    return graph.deepest()


def _resolve(schema: Any, reference: str) -> Sequence[Any]:
    """Return the one part that a reference names as a path in the schema, or nothing."""
    if reference in ("#", "#/"):
        return [schema]
    if not reference.startswith("#/"):
        return ()
    part = schema
    for step in unquote(reference[2:]).split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and key in part:
            part = part[key]
        elif isinstance(part, list) and key.isascii() and key.isdigit() and int(key) < len(part):
            part = part[int(key)]
        else:
            return ()
    return [part]


def _has_other_bases(schema: Any) -> bool:
    """Tell whether a part of a schema may have a base of its own for its references."""
    is_old = any("draft-04" in str(one.get("$schema")) for one in _objects(schema))
    ids = (*_IDS, "id") if is_old else _IDS
    return any(isinstance(one.get(key), str) for one in _objects(schema) for key in ids)


def _measure(value: Any) -> tuple[int, list[str]]:
    """Return how deep lists and objects of a JSON value are nested, and all its references."""
    level, levels = [value], 0
    references: list[str] = []
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
                if isinstance(one.get("$ref"), str):
                    references.append(one["$ref"])
            elif isinstance(one, list):
                inner += one
        level, levels = inner, levels + 1
    return levels, references


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            yield one
            rest += one.values()
        elif isinstance(one, list):
            rest += one
