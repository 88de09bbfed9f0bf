"""POST /tokenize and /detokenize: the token ids that completions have."""

from typing import Any

import pytest

from shared.messages import token_ids
from tests.gateway.running_gateway import RunningGateway

_TEXT = "Hello, 漢字 🎉 <|im_end|>"
_TOOLS = [{"type": "function", "function": {"name": "f"}}]


def _tokenize(gateway: RunningGateway, **fields: Any) -> dict[str, Any]:
    status, answer, _ = gateway.post("/tokenize", fields)
    assert status == 200, answer
    return answer


def test_text_has_the_tokens_that_its_completion_has(gateway: RunningGateway) -> None:
    """Ids, their number and the context are those of /v1/completions."""
    answer = _tokenize(gateway, prompt=_TEXT)
    gateway.post("/v1/completions", {"model": "tiny", "prompt": _TEXT})
    assert answer["tokens"] == token_ids.unpack(gateway.scheduler.submitted[-1].prompt).tolist()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert set(answer) == {"count", "max_model_len", "tokens"}


def test_conversation_has_the_tokens_that_its_answer_has(gateway: RunningGateway) -> None:
    """Template, tools and template arguments are those of /v1/chat/completions."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hello <|im_end|>"}],
        "tools": _TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = _tokenize(gateway, **body)
    gateway.post("/v1/chat/completions", {"model": "tiny", **body})
    assert answer["tokens"] == token_ids.unpack(gateway.scheduler.submitted[-1].prompt).tolist()


def test_tokens_become_the_same_text_again(gateway: RunningGateway) -> None:
    """Detokenizing is the inverse, with special tokens."""
    answer = _tokenize(gateway, model="tiny", prompt=_TEXT, return_token_strs=True)
    status, text, _ = gateway.post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, text) == (200, {"prompt": _TEXT})
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"][0] == "Hello"
    assert gateway.post("/detokenize", {"tokens": []})[1] == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x " * 100_000}, "prompt"),
        ("/tokenize", {"prompt": "x\n" * 10_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_invalid_request_is_refused_with_the_name_of_its_field(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    """Bad input is a 400."""
    status, answer, _ = gateway.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_model_is_refused(gateway: RunningGateway) -> None:
    """A model that is not served has no tokens here."""
    assert gateway.post("/tokenize", {"model": "other", "prompt": "x"})[0] == 404
    assert gateway.post("/detokenize", {"model": "other", "tokens": [1]})[0] == 404
