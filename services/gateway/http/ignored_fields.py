"""Request fields without effect. Owns finding and reporting them; knows no dialect's fields.

Clients send fields that are newer than this server. One that does no harm is ignored and reported:
in the header `X-Lockstep-Ignored`, in the log, and as a metric. One whose neglect would give a
wrong answer is refused with a 400.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web
from msgspec import inspect

from services.gateway.http import request_body
from services.gateway.http.errors import ApiError, unsupported

B = TypeVar("B", bound=msgspec.Struct)

HEADER = "X-Lockstep-Ignored"
IGNORED = web.RequestKey("ignored", list[str])
"""Paths of a request's fields without effect, without the numbers of list elements."""
NAMES_MAX = 32
"""Names in one header. A body may have 100,000 fields."""
NAME_CHARS_MAX = 100
REMEMBERED_MAX = 1_000
"""Names remembered as logged; clients choose them, so they must not fill the memory."""

_UNSET: tuple[Any, ...] = (None, "", [])
"""Values of a field that is as good as not there."""
_any_object = msgspec.json.Decoder(dict[str, Any])


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that this server does not know, and whose neglect would give a wrong answer."""

    remedy: str
    """The sentence that says what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for what this server does anyway, beside null, "" and []. They are passed
    over, since some clients send every field that they know."""

    def asks_nothing(self, value: Any) -> bool:
        """Return whether a request with this value means the same without the field."""
        return value in _UNSET or value in self.neutral


class LenientDecoder(Generic[B]):
    """Decoder of JSON bodies that leaves out unknown fields and names them.

    A body with known fields only is decoded once. One with others is decoded again without a type,
    and its unknown fields are removed.
    """

    def __init__(self, kind: type[B], refused: Mapping[str, RefusedField]) -> None:
        """Create the decoder of one type. Thread-safe.

        Args:
            kind: a struct that forbids unknown fields, and so do the structs inside it.
            refused: the unknown fields that must not be ignored, by their paths without the numbers
                of list elements.
        """
        self._kind = kind
        self._strict = msgspec.json.Decoder(kind)
        self._shape = _shape(inspect.type_info(kind)) or _Shape()
        self._refused = refused

    def decode(self, body: bytes) -> tuple[B, list[str]]:
        """Return the decoded body and the paths of its unknown fields, such as `messages.cached`.

        Raises:
            ApiError: 400 when the body is not JSON, does not fit the type, or has a field that must
                not be ignored; it names the field.
        """
        try:
            return request_body.decode(self._strict, body), []
        except ApiError as error:
            if error.code != request_body.UNKNOWN_FIELD:
                raise
        value: Any = request_body.decode(_any_object, body)
        ignored: dict[str, None] = {}
        for name, removed in self._shape.remove_unknown(value, ""):
            rule = self._refused.get(name)
            if rule is None:
                ignored[name] = None
            elif not rule.asks_nothing(removed):
                raise unsupported(name, rule.remedy)
        return request_body.convert(value, self._kind, ""), list(ignored)


def set_fields(body: msgspec.Struct, names: Iterable[str]) -> list[str]:
    """Return the names of those fields of a request that are set to something."""
    return [name for name in names if getattr(body, name) not in (None, msgspec.UNSET, [], {})]


def shown(name: str) -> str:
    """Return a field's path as it is reported: short, in printable ASCII, without separators."""
    clean = "".join(char if " " < char <= "~" and char not in ',"\\' else "?" for char in name)
    return clean if len(clean) <= NAME_CHARS_MAX else clean[: NAME_CHARS_MAX - 3] + "..."


async def add_header(request: web.Request, response: web.StreamResponse) -> None:
    """Add the header that names the ignored fields of the request, if there are any."""
    names = request.get(IGNORED)
    if names:
        more = ["..."] if len(names) > NAMES_MAX else []
        response.headers[HEADER] = ", ".join([*map(shown, names[:NAMES_MAX]), *more])


class LoggedFields:
    """The ignored fields that were logged, so that each is logged once per API key."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def add(self, name: str, key: str) -> bool:
        """Return whether this field of this key is new; False once too many are remembered."""
        if (name, key) in self._known or len(self._known) >= REMEMBERED_MAX:
            return False
        self._known.add((name, key))
        return True


@dataclasses.dataclass(slots=True)
class _Shape:
    """Where a JSON value has objects with known fields."""

    item: "_Shape | None" = None
    """Shape of the elements, if the value is a list."""
    tag_field: str = ""
    """Field that tells which struct an object is; "": there is only one."""
    fields: dict[Any, "dict[str, _Shape | None]"] = dataclasses.field(default_factory=dict)
    """Shapes of an object's fields by the value of its tag; None for values of any kind."""

    def remove_unknown(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Remove the fields that the type does not have from a value; yield path and value."""
        if isinstance(value, list):
            if self.item is not None:
                for item in value:
                    yield from self.item.remove_unknown(item, path)
            return
        if not isinstance(value, dict) or not self.fields:
            return
        tag = value.get(self.tag_field) if self.tag_field else None
        known = self.fields.get(tag) if isinstance(tag, str | None) else None
        if known is None:
            return
        for name in [name for name in value if name not in known]:
            yield path + name, value.pop(name)
        for name, inner in value.items():
            shape = known[name]
            if shape is not None:
                yield from shape.remove_unknown(inner, f"{path}{name}.")


def _shape(kind: inspect.Type) -> _Shape | None:
    """Return the shape of a type; None if it has no structs."""
    shape = _Shape()
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(one, inspect.ListType):
            shape.item = _shape(one.item_type)
        elif isinstance(one, inspect.StructType):
            fields = {field.encode_name: _shape(field.type) for field in one.fields}
            shape.tag_field = one.tag_field or ""
            shape.fields[one.tag] = {shape.tag_field: None, **fields} if one.tag else fields
    return shape if shape.item or shape.fields else None
