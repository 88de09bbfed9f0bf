"""Writer of one grammar in llguidance's form. Owns names of rules, and markers in them.

A grammar is Lark with further grammars beside it, which rules name as `@part`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from services.gateway.conversation.constraint import Constraint
from services.gateway.http.request_body import to_json

JSON_SPACE = r"( |\r?\n[ \t]{0,64})"
"""White space between the tokens of JSON: one space, or a line break and an indentation. Without a
limit a model may write it for ever."""

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|.", re.DOTALL)
"""A piece of a regular expression: a class is one. One that nothing closes ends with the text, so
that its end is not looked for at each bracket."""
_ANY_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \t\r\n]{1,8}/"


class GrammarWriter:
    """Collects the rules and parts of one grammar."""

    free_text = "FREE_TEXT"
    """Expression of any text without special tokens."""
    space = "SPACE?"
    """Expression of a little white space, or nothing."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """Begin without rules.

        Args:
            special_tokens: ids of the model's special tokens by text; a model cannot write their
                text in another way, and text of clients never contains them.
        """
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = [f"FREE_TEXT: {_ANY_TEXT}", f"SPACE: {_SPACE}"]
        self._parts: list[dict[str, Any]] = []

    def literal(self, text: str) -> str:
        """Return an expression for a text of the model's format, in which tokens are special."""
        places = self._find.finditer(text) if self._find is not None else ()
        pieces: list[str] = []
        start = 0
        for place in places:
            pieces += [quote(text[start : place.start()]), f"<[{self._special[place.group()]}]>"]
            start = place.end()
        pieces.append(quote(text[start:]))
        return " ".join(piece for piece in pieces if piece) or '""'

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name.

        Args:
            body: its expression.
            options: attributes of the rule, such as `[lazy]`.
        """
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def recursive(self, make: Callable[[str], str]) -> str:
        """Add a rule whose expression may name the rule itself, and return its name.

        Args:
            make: returns the expression, given the rule's name.
        """
        place = len(self._rules)
        name = f"r{place}"
        self._rules.append("")
        self._rules[place] = f"{name}: {make(name)}"
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, an expression that a regular expression could have, and return its name.

        Args:
            body: strings, regular expressions and terminals; `&` and `~` may join them.
        """
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def text_without(self, pattern: str) -> str:
        """Return a terminal of any text without special tokens in which a pattern is not found.

        Args:
            pattern: a regular expression.
        """
        found = regex_to_lark(rf"(.|\n)*({pattern})(.|\n)*", "dw")
        return self.terminal(f"{self.free_text} & ~/{found}/")

    def up_to(self, marker: str, text: str = free_text) -> str:
        """Return an expression for text that ends with the first place of a marker.

        Args:
            marker: the marker.
            text: the text before it, as in `terminal`.
        """
        place = self._find.search(marker) if self._find is not None else None
        if place is None:
            return self.rule(f"{text} {quote(marker)}", "[lazy]")
        begun, rest = marker[: place.start()], marker[place.start() :]
        before = (
            self.terminal(f"{text} {quote(begun)}") if text != self.free_text or begun else text
        )
        return f"{before} {self.literal(rest)}"

    def add_json(self, schema: Mapping[str, Any]) -> str:
        """Add and return an expression for JSON that matches a schema, with limited white space."""
        return self._part({"json_schema": with_options(schema)})

    def add_regex(self, pattern: str) -> str:
        """Add and return an expression for a regular expression of a client."""
        return self.add_lark(regex_grammar(pattern))

    def add_lark(self, text: str) -> str:
        """Add and return an expression for a client's Lark grammar, whose first rule is `start`."""
        return self._part({"lark_grammar": text})

    def add_text_form(self, form: Constraint) -> str:
        """Add and return an expression for texts of a custom tool, by its Lark grammar or regex."""
        return self.add_lark(form.value) if form.kind == "lark" else self.add_regex(form.value)

    def choice(self, texts: Sequence[str]) -> str:
        """Return an expression for one of several texts."""
        return self.rule(" | ".join(quote(text) or '""' for text in texts))

    def finish(self, start: str) -> str:
        """Return the text of the grammar.

        Args:
            start: the expression that the whole text must match.
        """
        lark = "\n".join([f"start: {start}", *self._rules]) + "\n"
        return to_json({"grammars": [{"lark_grammar": lark}, *self._parts]}).decode()

    def _part(self, grammar: dict[str, Any]) -> str:
        name = f"part{len(self._parts)}"
        self._parts.append({"name": name, **grammar})
        return f"@{name}"


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema with the options of this server in place of a client's own."""
    options = {"whitespace_pattern": JSON_SPACE}
    return {**schema, "x-guidance": options}


def regex_grammar(pattern: str) -> str:
    """Return the Lark grammar of a regular expression."""
    return str(json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"])


def search_regex(pattern: str) -> str:
    """Return a terminal's expression of the texts in which a JSON schema finds its pattern.

    A pattern may be found anywhere, unless an alternative of it begins with ^ or ends with $.
    """
    anywhere = r"(.|\n)*"
    found = []
    for part in _alternatives(pattern):
        first = "" if part.startswith("^") else anywhere
        ends = re.search(r"(?<!\\)(\\\\)*\$\Z", part) is not None
        found.append(f"{first}({part.removeprefix('^')[: -1 if ends else None]})")
        found[-1] += "" if ends else anywhere
    return f"/{regex_to_lark('|'.join(found), 'dw')}/"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression, which stand between | outside of groups."""
    found = [""]
    depth = 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            found.append("")
        else:
            found[-1] += piece
    return found


def quote(text: str) -> str:
    """Return a Lark string for a text without special tokens; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""
