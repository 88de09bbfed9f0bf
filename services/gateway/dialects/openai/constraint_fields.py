"""Constraints of the text in OpenAI's and vLLM's request fields. Owns their names."""

from typing import Any

from services.gateway.conversation.constraint import Constraint, any_json_object, json_schema
from services.gateway.dialects.openai.request_types import (
    GenerationFields,
    RequestedFormat,
    StructuredOutputs,
)
from services.gateway.http.errors import invalid_field


def read_constraint(
    request: GenerationFields, response_format: Constraint | None = None
) -> Constraint | None:
    """Return the constraint of a request's text; None: any text.

    Args:
        request: the request.
        response_format: that of its response format, if the endpoint has one.

    Raises:
        ApiError: 400 when there are several, or one is not valid.
    """
    guided = {
        "json": request.guided_json,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    found = [response_format]
    found += [_guided(kind, value, f"guided_{kind}") for kind, value in guided.items()]
    if request.structured_outputs is not None:
        found += _structured(request.structured_outputs)
    constraints = [one for one in found if one is not None]
    if len(constraints) > 1:
        problem = f"it cannot be combined with {constraints[0].param}; give one of them."
        raise invalid_field(constraints[1].param, problem)
    return constraints[0] if constraints else None


def chat_format(requested: RequestedFormat | None) -> Constraint | None:
    """Return the constraint of a chat request's `response_format`; None: any text.

    Raises:
        ApiError: 400 when its schema is missing or not valid.
    """
    param = "response_format"
    if requested is None:
        return None
    match requested.type:
        case "text":
            return None
        case "json_object":
            if requested.schema is not None:
                return json_schema(requested.schema, f"{param}.schema")
            return any_json_object(param)
        case "json_schema":
            given = requested.json_schema
            if given is None:
                problem = 'it is required with the type "json_schema".'
                raise invalid_field(f"{param}.json_schema", problem)
            if given.schema is None:
                return any_json_object(param)
            return json_schema(given.schema, f"{param}.json_schema.schema")


def _structured(given: StructuredOutputs) -> list[Constraint | None]:
    fields = {
        "json": given.json,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
    }
    found = [_guided(kind, value, f"structured_outputs.{kind}") for kind, value in fields.items()]
    if given.json_object:
        found.append(any_json_object("structured_outputs.json_object"))
    return found


def _guided(kind: str, value: Any, param: str) -> Constraint | None:
    if value is None:
        return None
    match kind:
        case "json":
            return json_schema(value, param)
        case "regex":
            return Constraint("regex", value, param)
        case "choice":
            return Constraint("choice", value, param)
    return Constraint("lark", value, param)
