"""Writes the pages of settings, errors, API and metrics in docs/reference from the code.

Run `make generated` after a change; a test compares the documents with the return values.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import structs

from services.gateway.dialects import openapi
from services.gateway.http.authentication import PROBES
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from shared import errors
from shared.clock import ManualClock
from shared.configuration import loading
from shared.configuration.settings import Config
from shared.messages import DraftStatistics, RequestRejected, StatusReported
from shared.messages.reported_numbers import COUNTERS, GAUGES
from tools.field_texts import field_texts
from tools.write_example_config import setting_facts

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
_GENERATED = "<!-- Written by `make generated`; do not edit. -->\n"
_SOURCES = ("services", "shared")
_SETTINGS_INTRODUCTION = """\
One TOML file configures every role. Flags win over environment variables, and those over the file.
The variable of `gateway.port` is `LOCKSTEP_GATEWAY_PORT`. An unknown key or a value out of range is
an error that names it. `lockstep.example.toml` has the same list as a file.
"""
_ERRORS_INTRODUCTION = """\
Every error ends with one sentence on standard error and an exit code. The sentences below are the
ones in the code; `…` stands for a value. A sentence names the remedy where there is one.
"""
_API_INTRODUCTION = """\
`/openapi.json` of a running gateway is the same as an OpenAPI 3.1 document, with the bounds of its
configuration.
"""
_HEADERS = """\
## Headers

| header | direction | meaning |
|---|---|---|
| `Authorization: Bearer KEY`, `x-api-key: KEY` | request | the API key |
| `traceparent`, `tracestate` | request | the client's trace (W3C Trace Context) |
| `Content-Type: application/json` | request | the only accepted body type |
| `anthropic-version` | request | `/v1/models` answers in the form of Anthropic's API |
| `x-lockstep-ignored` | response | fields of the request [without effect](ignored-fields.md) |
| `request-id` | response | id of an error of the Messages API |
| `x-lockstep-cache` | response | prompt tokens found in memory and on SSD, and tokens computed |
| `Retry-After` | response | seconds after which a 429 or 503 may succeed |
"""
_METRICS_INTRODUCTION = """\
`GET /metrics` of a gateway has all of them in Prometheus' text format. Times are in seconds, sizes
in bytes; the unit is part of the name. The second word of some
names is "scheduler" or "cache": the scheduler reports these, and they are equal on all gateways.
"""
_REJECTION_CAUSES = get_args(
    next(field.type for field in structs.fields(RequestRejected) if field.name == "cause")
)
_NO_EXIT = {"FrameRefused", "LinkFull", "PeerUnknown", "InvariantBroken"}


def settings_page() -> str:
    """Return the page of all settings as Markdown."""
    blocks = ["# Settings\n", _GENERATED, _SETTINGS_INTRODUCTION]
    for section, struct in loading.sections().items():
        summary = (inspect.getdoc(struct) or "").splitlines()[0]
        rows = [
            f"## {section}\n",
            f"{summary}\n",
            "| setting | meaning | values |",
            "|---|---|---|",
        ]
        texts = field_texts(struct)
        for field in msgspec.structs.fields(struct):
            text = texts[field.name].replace("|", "\\|")
            facts = setting_facts(field).replace("|", "\\|")
            rows.append(f"| `{section}.{field.name}` | {text} | {facts} |")
        blocks.append("\n".join(rows) + "\n")
    return "\n".join(blocks)


def errors_page() -> str:
    """Return the page of all error sentences as Markdown, in order of exit codes."""
    by_class: dict[str, set[str]] = defaultdict(set)
    for name, sentence in _raised():
        by_class[name].add(sentence)
    blocks = ["# Errors\n", _GENERATED, _ERRORS_INTRODUCTION]
    for name in sorted(by_class, key=lambda name: (_exit_code(name), name)):
        kind = getattr(errors, name)
        summary = (inspect.getdoc(kind) or "").splitlines()[0]
        code = "" if name in _NO_EXIT else f" (exit code {_exit_code(name)})"
        lines = [f"## {name}{code}\n", f"{summary}\n"]
        lines += [f"- {sentence}" for sentence in sorted(by_class[name])]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def api_page() -> str:
    """Return the page of the HTTP API as Markdown: endpoints, fields, errors."""
    document = openapi.document(Config(), 1_000, needs_key=True, open_paths=PROBES)
    schemas = document["components"]["schemas"]
    blocks = ["# HTTP API\n", _GENERATED, _API_INTRODUCTION, "## Endpoints\n"]
    rows = ["| endpoint | meaning | errors |", "|---|---|---|"]
    used: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if not isinstance(operation, dict) or "responses" not in operation:
                continue
            codes = ", ".join(code for code in operation["responses"] if code >= "400")
            rows.append(f"| `{method.upper()} {path}` | {operation.get('summary', '')} | {codes} |")
            used += _references(operation.get("requestBody", {}))
    blocks.append("\n".join(rows) + "\n")
    blocks += [_schema_table(name, schemas[name]) for name in _with_children(used, schemas)]
    blocks.append(_HEADERS)
    return "\n".join(blocks)


def _schema_table(name: str, schema: dict[str, Any]) -> str:
    lines = [f"## {name}\n"]
    if text := schema.get("description"):
        lines.append(f"{_one_line(text)}\n")
    lines += ["| field | type | required | meaning |", "|---|---|---|---|"]
    required = schema.get("required", [])
    texts = _field_texts(name)
    for field, facts in schema.get("properties", {}).items():
        need = "yes" if field in required else ""
        meaning = _one_line(texts.get(field) or facts.get("description", ""))
        lines.append(f"| `{field}` | {_type(facts)} | {need} | {meaning} |")
    return "\n".join(lines) + "\n"


def _field_texts(name: str) -> dict[str, str]:
    """Return the docstrings of a request type's fields, including inherited ones."""
    struct = openapi.request_type(name)
    if struct is None:
        return {}
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            texts |= field_texts(base)
    return texts


def _type(facts: dict[str, Any]) -> str:
    if "$ref" in facts:
        return str(facts["$ref"]).rpartition("/")[2]
    if "anyOf" in facts:
        return " or ".join(dict.fromkeys(_type(one) for one in facts["anyOf"]))
    if "enum" in facts:
        return ", ".join(f"`{value}`" for value in facts["enum"])
    if "const" in facts:
        return f"`{facts['const']}`"
    kind = str(facts.get("type", "any"))
    if kind == "array":
        kind = f"list of {_type(facts.get('items', {}))}"
    low, high = facts.get("minimum"), facts.get("maximum")
    bounds = [f"{low} to {high}"] if low is not None and high is not None else []
    if "maxLength" in facts:
        bounds.append(f"at most {facts['maxLength']} characters")
    if "maxItems" in facts:
        bounds.append(f"at most {facts['maxItems']} items")
    return ", ".join([kind, *bounds])


def metrics_page() -> str:
    """Return the page of all metrics that a gateway exposes, as Markdown."""
    board = StatusBoard(ManualClock())
    board.report(_full_status(), 0.0)
    collector = GatewayMetrics(board)
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(collector.collect(), key=lambda family: family.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = getattr(family, "_labelnames", ())
        text = _one_line(family.documentation)
        rows.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {text} |")
    return "\n".join(["# Metrics\n", _GENERATED, _METRICS_INTRODUCTION, *rows]) + "\n"


def _full_status() -> StatusReported:
    """Return a status with every number."""
    rejected = {f"requests_rejected_{cause}_total": 1.0 for cause in _REJECTION_CAUSES}
    draft = DraftStatistics(method="ngram", rows=1, proposed_at=[1], accepted_at=[1])
    return StatusReported(
        ready=True, reason="", draining=False, epoch=1, world_size=1, backend="off", model="demo",
        model_fingerprint="", ranks=[], running=0, waiting=0, kv_tokens_used=0,
        kv_tokens_max=1, context_tokens_max=1, steps=0, drafts=[draft],
        counters={**dict.fromkeys(COUNTERS, 1.0), **rejected},
        gauges=dict.fromkeys(GAUGES, 1.0),
    )  # fmt: skip


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if "$ref" in node else []
        return own + [name for value in node.values() for name in _references(value)]
    if isinstance(node, list):
        return [name for value in node for name in _references(value)]
    return []


def _with_children(names: list[str], schemas: dict[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop(0)
        if name not in seen:
            seen.add(name)
            yield name
            queue += _references(schemas[name])


def _raised() -> Iterator[tuple[str, str]]:
    """Yield the class and the sentence of each error that the code raises with a literal text."""
    names = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
                    sentence = _sentence(node.args[0])
                    if node.func.id in names and " " in sentence:
                        yield node.func.id, sentence


def _sentence(node: ast.expr) -> str:
    """Return a string literal with `…` for each value; "" for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _one_line(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values]
        return _one_line("".join(parts))
    return ""


def _exit_code(name: str) -> int:
    return int(getattr(errors, name).exit_code)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    FOLDER / "settings.md": settings_page,
    FOLDER / "errors.md": errors_page,
    FOLDER / "api.md": api_page,
    FOLDER / "metrics.md": metrics_page,
}


def main() -> None:
    """Write all pages into docs/reference."""
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
