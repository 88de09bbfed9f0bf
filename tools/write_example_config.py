"""Generator of lockstep.example.toml. Reads names, docstrings and ranges from the settings.

Run `make generated` after a change of a setting; a test compares the file with `render()`.
"""

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from shared.configuration import loading
from tools.field_texts import field_default, field_texts

FILE = Path(__file__).resolve().parents[1] / "lockstep.example.toml"

_HEAD = """\
# Every setting of Lockstep with its default. Copy what you change; the rest may stay away.
#
#   lockstep up --config lockstep.toml
#
# Flags win over environment variables, and those over this file. The variable of a setting is named
# after its section and key: LOCKSTEP_GATEWAY_PORT=9000 sets [gateway] port. An unknown key or a
# value out of range is an error that names it.
"""
_UNITS = (
    ("bytes_max", "bytes"),
    ("_s", "seconds"),
    ("_ms", "milliseconds"),
    ("tokens_max", "tokens"),
    ("tokens_step", "tokens"),
    ("max_tokens", "tokens"),
)
_WIDTH = 96


def render() -> str:
    """Return the text of lockstep.example.toml: every setting with its default and description."""
    blocks = [_HEAD]
    for name, struct in loading.sections().items():
        summary = inspect.getdoc(struct) or ""
        blocks.append(f"# {summary.splitlines()[0]}\n[{name}]\n")
        texts = field_texts(struct)
        fields = msgspec.structs.fields(struct)
        blocks += [_setting(field, texts[field.name]) for field in fields]
    return "\n".join(blocks)


def setting_facts(field: msgspec.structs.FieldInfo) -> str:
    """Return unit, range and default of a setting as text, separated by semicolons."""
    value = _literal(field_default(field))
    return "; ".join(filter(None, [_unit(field.name), _range(field.type), f"default {value}"]))


def _setting(field: msgspec.structs.FieldInfo, text: str) -> str:
    value = _literal(field_default(field))
    facts = setting_facts(field)
    comment = [*textwrap.wrap(text, _WIDTH), *textwrap.wrap(facts[:1].upper() + facts[1:], _WIDTH)]
    return "".join(f"# {line}\n" for line in comment) + f"{field.name} = {value}\n"


def _unit(key: str) -> str:
    return next((unit for ending, unit in _UNITS if key.endswith(ending)), "")


def _range(kind: Any) -> str:
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(json.dumps(value) for value in values)
        case msgspec.inspect.IntType(ge=int(low), le=int(high)):
            return f"{low:,} to {high:,}"
        case msgspec.inspect.FloatType(gt=float(low), le=float(high)):
            return f"more than {low:g}, at most {high:,.0f}"
        case msgspec.inspect.FloatType(ge=float(low), le=float(high)):
            return f"{low:g} to {high:,.0f}"
        case msgspec.inspect.BoolType():
            return "true or false"
    return ""


def _literal(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value > 65_535:
        return f"{value:_}"
    return json.dumps(value)


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
