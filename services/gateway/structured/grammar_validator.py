"""Checks of grammars before any rank sees them. Owns naming the refused part of a schema."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from services.gateway.conversation.constraint import Constraint
from services.gateway.http.errors import ApiError, invalid_field
from services.gateway.http.request_body import to_json
from services.gateway.structured.grammar_writer import GrammarWriter, with_options
from services.gateway.structured.trials import FAILED, Trials
from shared import limits
from shared.clock import Clock, SystemClock

_PROBES_MAX = 100
"""Parts of a schema that are compiled alone to find the refused one."""
_PROBES_S_MAX = 0.5
"""Time for that: a shorter path is no harm, but the others wait for the thread."""
_KNOWN_MAX = 1_024
"""Grammars whose outcome is known; an agent sends the same one with every turn."""
CHOICES_MAX = 1_024
"""Most texts of a choice."""

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then")


class GrammarValidator:
    """Refuses grammars that ranks could not compile, or not with little time and memory.

    Thread-safe. A grammar that is not known is tried in another process, which takes a millisecond
    more than the library; most take milliseconds, and none more than seconds.
    """

    def __init__(
        self, special_ids: Iterable[int], trials: Trials, clock: Clock | None = None
    ) -> None:
        """Begin without known grammars.

        Args:
            special_ids: ids of the model's special tokens.
            trials: where unknown grammars are compiled.
            clock: ends the search for the refused part of a schema; None: the machine's.
        """
        self._clock = clock or SystemClock()
        self._special_ids = sorted(special_ids)
        self._trials = trials
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        """Why a grammar cannot be compiled, "" if it can, by its hash; the last used at the end."""
        self._lock = threading.Lock()

    def check(self, text: str, param: str) -> None:
        """Refuse a grammar that cannot be compiled.

        Args:
            text: the grammar.
            param: the request field that it came from.

        Raises:
            ApiError: 400 with the library's reason.
        """
        if len(text) > limits.GRAMMAR_CHARS_MAX:
            raise invalid_field(
                param,
                f"the grammar made of it has {len(text)} characters, but at most "
                f"{limits.GRAMMAR_CHARS_MAX} are allowed.",
            )
        if problem := self._problem(text):
            raise invalid_field(param, f"{problem}.", "unsupported_value")

    def check_constraint(self, constraint: Constraint) -> None:
        """Refuse a constraint that cannot be compiled; of a schema the error names the part.

        Raises:
            ApiError: 400 that names the field, and in a schema the path.
        """
        value, param = constraint.value, constraint.param
        writer = GrammarWriter({})
        match constraint.kind:
            case "json_schema":
                self.check_schema(value, param)
            case "regex":
                self.check(writer.finish(writer.add_regex(value)), param)
            case "lark":
                self.check(writer.finish(writer.add_lark(value)), param)
            case "choice":
                if not 0 < len(value) <= CHOICES_MAX:
                    raise invalid_field(param, f"1 to {CHOICES_MAX} texts are allowed.")
                self.check(writer.finish(writer.choice(value)), param)

    def can_match(self, constraint: Constraint) -> bool:
        """Return whether a constraint can be compiled."""
        try:
            self.check_constraint(constraint)
        except ApiError:
            return False
        return True

    def check_schema(self, schema: Mapping[str, Any], param: str) -> None:
        """Refuse a JSON schema that cannot be compiled.

        Args:
            schema: the schema.
            param: the request field that it came from.

        Raises:
            ApiError: 400 that names the path of the smallest part that cannot be compiled.
        """
        try:
            self.check(_schema_text(schema), param)
        except ApiError:
            problem = self._problem(_schema_text(schema))
            if not problem:
                raise
            path = self._refused_path(schema, problem)
            raise invalid_field(f"{param}{path}", f"{problem}.", "unsupported_value") from None

    def _problem(self, text: str) -> str:
        """Return why a grammar cannot be compiled; "" if it can."""
        name = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        with self._lock:
            if name in self._problems:
                self._problems.move_to_end(name)
                return self._problems[name]
        problem = self._trials.find_problem(text, self._special_ids)
        with self._lock:
            self._problems[name] = problem
            while len(self._problems) > _KNOWN_MAX:
                self._problems.popitem(last=False)
        return problem

    def _refused_path(self, schema: Mapping[str, Any], problem: str) -> str:
        """Return the path of the smallest part of a schema with a problem, "" for the whole.

        It is the path of a larger part where the time does not suffice.
        """
        if problem == FAILED:
            # Each of its parts may take as long.
            return ""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        probes, end_s = 0, self._clock.now() + _PROBES_S_MAX
        part, path = schema, ""
        while True:
            for step, child in _children(part):
                probes += 1
                if probes > _PROBES_MAX or self._clock.now() > end_s:
                    return path
                if self._problem(_schema_text({**shared, **child})) == problem:
                    part, path = child, f"{path}.{step}"
                    # Definitions were searched at the top; a part has only those of its own.
                    break
            else:
                return path


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, subschema) of the direct parts of a schema."""
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                if isinstance(child, dict):
                    yield f"{key}.{name}", child
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for number, child in enumerate(schema[key]):
                if isinstance(child, dict):
                    yield f"{key}[{number}]", child
    for key in (*_SINGLES, "else"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]


def _schema_text(schema: Mapping[str, Any]) -> str:
    return to_json({"grammars": [{"json_schema": with_options(schema)}]}).decode()
