"""Speculation methods that a client may choose, by the server's configuration."""

import msgspec
import orjson
import pytest

from services.gateway.dialects import openapi
from services.gateway.dialects.openai.request_types import CompletionRequest
from services.gateway.dialects.openai.validation import check_completion
from services.gateway.http import request_body
from services.gateway.http.errors import ApiError
from shared.configuration.loading import config_from_tree

_DECODER = msgspec.json.Decoder(CompletionRequest)
ALWAYS = ["default", "off", "ngram"]


def _config(method: str) -> dict[str, object]:
    drafts = {"draft_model": "small"} if method in ("draft_model", "eagle") else {}
    return {"speculation": {"method": method, **drafts}}


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model", "eagle"])
@pytest.mark.parametrize("requested", ["default", "off", "ngram", "draft_model", "eagle"])
def test_request_is_refused_when_it_chooses_unconfigured_speculation_method(
    method: str, requested: str
) -> None:
    """`off`, `ngram` and the configured method are allowed; a 400 lists the allowed ones."""
    config = config_from_tree(_config(method))
    body = orjson.dumps({"model": "m", "prompt": "x", "speculation": {"method": requested}})
    request = request_body.decode(_DECODER, body)
    if requested in (*ALWAYS, method):
        assert check_completion(request, config).speculation.method == requested
        return
    with pytest.raises(ApiError) as caught:
        check_completion(request, config)
    assert caught.value.status == 400
    assert f"{requested} is not supported by this server" in caught.value.message
    last = method if method not in ALWAYS else "ngram"
    assert caught.value.message.endswith(f"and {last} are.")


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model", "eagle"])
def test_openapi_document_lists_configured_speculation_methods(method: str) -> None:
    """The OpenAPI document lists the same methods."""
    document = openapi.document(
        config_from_tree(_config(method)), 100, needs_key=False, open_paths=[]
    )
    schema = document["components"]["schemas"]["SpeculationOptions"]["properties"]["method"]
    expected = [*ALWAYS, *([method] if method not in ALWAYS else []), None]
    assert schema["anyOf"] == [{"enum": expected}]
