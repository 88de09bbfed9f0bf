"""Speculation over HTTP: the request field `speculation` and the draft counts in the usage."""

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from shared import limits
from shared.messages import (
    CachedPrefix,
    RequestAccepted,
    RequestAdmitted,
    SubmitRequest,
    token_ids,
)
from shared.messages.gateway_link import Speculation
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import Reply, finished, generated, reply_with

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_BODIES: dict[str, dict[str, Any]] = {
    _CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    _TEXT: {"prompt": "Hello"},
}
_TOKENIZER = tiny_tokenizer.train()
_WITH_USAGE = {"stream_options": {"include_usage": True}}


def _ids(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text).ids
    return ids


def _details(accepted: int, rejected: int) -> dict[str, int]:
    return {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }


def _reply_in_steps(steps: list[list[int]], rejected: int, reason: str = "stop") -> Reply:
    """Reply with several tokens per step; all but a step's last token are accepted drafts."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield RequestAdmitted(request_id=request.request_id, cached=CachedPrefix())
        position = 0
        for tokens in steps:
            yield generated(request, position, tokens)
            position += len(tokens)
        end = finished(request, position, reason)
        accepted = sum(len(tokens) - 1 for tokens in steps)
        yield msgspec.structs.replace(end, drafts_accepted=accepted, drafts_rejected=rejected)

    return reply


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Speculation()),
        ({"speculation": None}, Speculation()),
        ({"speculation": {}}, Speculation()),
        ({"speculation": {"method": None, "tokens": None}}, Speculation()),
        ({"speculation": "off"}, Speculation(method="off")),
        ({"speculation": {"method": "off"}}, Speculation(method="off")),
        ({"speculation": {"method": "default", "tokens": 0}}, Speculation()),
        ({"speculation": {"method": "ngram"}}, Speculation(method="ngram")),
        (
            {"speculation": {"method": "ngram", "tokens": 16}},
            Speculation(method="ngram", tokens=16),
        ),
        ({"speculation": {"tokens": 1}}, Speculation(tokens=1)),
    ],
)
def test_speculation_field_of_request_reaches_scheduler_for_every_choice(
    gateway: RunningGateway, path: str, given: dict[str, Any], expected: Speculation
) -> None:
    """Every choice carries the requested speculation; missing parts are the server's default."""
    assert gateway.post(path, {"model": "tiny", "n": 2, **_BODIES[path], **given})[0] == 200
    assert [request.speculation for request in gateway.scheduler.submitted] == [expected] * 2


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_gateway_answers_400_when_speculation_method_is_unavailable(
    gateway: RunningGateway, path: str, method: str
) -> None:
    """Status 400 names the available methods; nothing reaches the scheduler."""
    body = {"model": "tiny", **_BODIES[path], "speculation": {"method": method}}
    status, response, _ = gateway.post(path, body)
    assert (status, response["error"]["param"]) == (400, "speculation.method")
    assert response["error"]["code"] == "unsupported_value"
    assert f"{method} is not supported by this server" in response["error"]["message"]
    assert "ngram" in response["error"]["message"]
    assert gateway.scheduler.submitted == []


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_usage_sums_draft_tokens_of_all_choices(
    gateway: RunningGateway, path: str, is_streamed: bool
) -> None:
    """Accepted drafts are completion tokens, rejected drafts are not."""
    tokens = _ids("one two three")
    assert len(tokens) > 3
    gateway.scheduler.reply = _reply_in_steps([tokens[:1], tokens[1:3], tokens[3:]], rejected=5)
    body = {"n": 2, **_BODIES[path]}
    if is_streamed:
        last = gateway.stream(path, {**body, **_WITH_USAGE})[-2]
        assert isinstance(last, dict)
        usage = last["usage"]
    else:
        usage = gateway.post(path, {"model": "tiny", **body})[1]["usage"]
    assert usage["completion_tokens"] == 2 * len(tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"] == _details(2 * (len(tokens) - 3), 10)


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
def test_usage_has_zero_draft_counts_without_drafts(gateway: RunningGateway, path: str) -> None:
    """The usage always has the draft counts, as in OpenAI's API."""
    gateway.scheduler.reply = reply_with(_ids("one two"))
    usage = gateway.post(path, {"model": "tiny", **_BODIES[path]})[1]["usage"]
    assert usage["completion_tokens_details"] == _details(0, 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_text_and_token_count_end_at_stop_string_inside_drafts(
    gateway: RunningGateway, is_streamed: bool
) -> None:
    """Text and counts are those of one token per step; drafts after the stop count as rejected."""
    tokens = _ids("abXcd")
    assert len(tokens) == 5
    body = {**_BODIES[_TEXT], "stop": "X"}
    found = []
    for steps in ([[token] for token in tokens], [tokens], [tokens[:2], tokens[2:], tokens]):
        gateway.scheduler.reply = _reply_in_steps(steps, rejected=1)
        if is_streamed:
            events = gateway.stream(_TEXT, {**body, **_WITH_USAGE})[:-1]
            chunks = [event for event in events if isinstance(event, dict)]
            text = "".join(one["choices"][0]["text"] for one in chunks[:-1])
            usage = chunks[-1]["usage"]
        else:
            response = gateway.post(_TEXT, {"model": "tiny", **body})[1]
            text, usage = response["choices"][0]["text"], response["usage"]
        found.append((text, usage["completion_tokens"], usage["completion_tokens_details"]))
    assert found == [
        ("ab", 3, _details(0, 1)),
        # Five tokens in one step: four were drafts, three of them before the stop.
        ("ab", 3, _details(3, 1 + 1)),
        # One accepted draft in each of the first two steps; one and four drafts after the stop.
        ("ab", 3, _details(2, 1 + 1 + 4)),
    ]


def test_openai_client_reads_draft_counts_from_usage(gateway: RunningGateway) -> None:
    """OpenAI's client reads the counts of whole, streamed and text completions."""
    tokens = _ids("one two three")
    gateway.scheduler.reply = _reply_in_steps([tokens], rejected=2)
    messages: list[Any] = _BODIES[_CHAT]["messages"]
    extra = {"speculation": {"method": "ngram", "tokens": 4}}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
        chunks = client.chat.completions.create(
            model="tiny",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        text = client.completions.create(model="tiny", prompt="x", extra_body=extra)
        usages = [whole.usage, list(chunks)[-1].usage, text.usage]
    assert {request.speculation.tokens for request in gateway.scheduler.submitted} == {4}
    for usage in usages:
        assert usage is not None
        details = usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens == len(tokens) - 1
        assert details.rejected_prediction_tokens == 2
        assert usage.completion_tokens == len(tokens)


@pytest.mark.parametrize(
    "content",
    [
        "The scheduler decides",
        [{"type": "text", "text": "The sche"}, {"type": "text", "text": "duler decides"}],
    ],
)
def test_prediction_reaches_scheduler_as_tokens_of_every_choice(
    gateway: RunningGateway, content: object
) -> None:
    """A predicted text, whole or in parts, is a source of drafts and no ignored field."""
    body = {
        "model": "tiny",
        "n": 2,
        **_BODIES[_CHAT],
        "prediction": {"type": "content", "content": content},
        "speculation": {"method": "ngram"},
    }
    status, _, headers = gateway.post(_CHAT, body)

    assert status == 200
    assert "x-lockstep-ignored" not in headers
    sent = [token_ids.unpack(one.prediction).tolist() for one in gateway.scheduler.submitted]
    assert sent == [_ids("The scheduler decides")] * 2


@pytest.mark.parametrize("wish", [{}, {"speculation": "off"}])
def test_prediction_is_ignored_where_speculation_is_off(
    gateway: RunningGateway, wish: dict[str, Any]
) -> None:
    """Without drafts a prediction has no effect, which the response says."""
    prediction = {"type": "content", "content": "The scheduler decides"}
    body = {"model": "tiny", **_BODIES[_CHAT], "prediction": prediction, **wish}
    status, _, headers = gateway.post(_CHAT, body)

    assert status == 200
    assert headers["x-lockstep-ignored"] == "prediction"
    assert [one.prediction for one in gateway.scheduler.submitted] == [b""]


def test_prediction_is_cut_to_longest_that_a_message_may_have(gateway: RunningGateway) -> None:
    """The end of a longer prediction is left out, and the request is served."""
    prediction = {"type": "content", "content": "0123456789" * limits.PREDICTION_TOKENS_MAX}
    body = {
        "model": "tiny",
        **_BODIES[_CHAT],
        "prediction": prediction,
        "speculation": {"method": "ngram"},
    }
    assert gateway.post(_CHAT, body)[0] == 200
    [submitted] = gateway.scheduler.submitted
    assert len(submitted.prediction) == limits.PREDICTION_TOKENS_MAX * token_ids.TOKEN_BYTES


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "file", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 1}, "prediction.content"),
        ({"content": "x"}, "prediction.type"),
    ],
)
def test_malformed_prediction_is_refused_by_name(
    gateway: RunningGateway, prediction: object, param: str
) -> None:
    """Status 400 names the field."""
    body = {"model": "tiny", **_BODIES[_CHAT], "prediction": prediction}
    status, response, _ = gateway.post(_CHAT, body)

    assert status == 400
    assert response["error"]["param"] == param
