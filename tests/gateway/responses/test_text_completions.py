"""POST /v1/completions: filling in the middle, and the best of several completions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.messages import (
    CachedPrefix,
    RequestAccepted,
    RequestAdmitted,
    SubmitRequest,
    TokenLogprobs,
    token_ids,
)
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated, reply_with

_PATH = "/v1/completions"
_TOKENIZER = tiny_tokenizer.train()
_MARKERS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
_TEXTS = ["one", "two three", "four", "six seven"]
_LOGPROBS = [-3.0, -0.5, -1.0, -0.25]
"""Log probability of every token of the text at the same place."""


def _ids(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text).ids
    return ids


@pytest.fixture(scope="module")
def code_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """Run a gateway whose model has markers for filling in the middle."""
    folder = tmp_path_factory.mktemp("code-model")
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = tiny_tokenizer.train()
    tokenizer.add_special_tokens(_MARKERS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size() + 10
    (folder / "config.json").write_text(json.dumps(config))
    with RunningGateway.start(folder, tmp_path_factory.mktemp("run")) as running:
        yield running


def test_suffix_makes_prompt_of_markers_and_both_texts(code_gateway: RunningGateway) -> None:
    """The model sees prefix, suffix and its markers, and its own ends of a middle end the text."""
    prefix, suffix, middle, pad = (
        _TOKENIZER.get_vocab_size() + number for number in range(len(_MARKERS))
    )
    code_gateway.scheduler.reply = reply_with(_ids(" two "))
    body = {"model": "tiny", "prompt": "one", "suffix": "three", "echo": True}

    status, answer, _ = code_gateway.post(_PATH, body)

    assert status == 200, answer
    assert answer["choices"][0]["text"] == "one two "
    [submitted] = code_gateway.scheduler.submitted
    assert token_ids.unpack(submitted.prompt).tolist() == [
        prefix,
        *_ids("one"),
        suffix,
        *_ids("three"),
        middle,
    ]
    assert pad in submitted.stop_ids


def test_suffix_is_refused_where_model_has_no_markers(gateway: RunningGateway) -> None:
    """Status 400 names the field and the missing markers, and an empty suffix is ignored."""
    body = {"model": "tiny", "prompt": "one", "suffix": "three"}
    status, answer, _ = gateway.post(_PATH, body)

    assert (status, answer["error"]["param"]) == (400, "suffix")
    assert "filling in the middle" in answer["error"]["message"]
    assert gateway.scheduler.submitted == []
    assert gateway.post(_PATH, {**body, "suffix": ""})[0] == 200


def _reply_by_seed(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
    """Answer each choice with the text and the log probabilities of its number."""
    number = int(request.request_id.rpartition(":")[2]) % len(_TEXTS)
    tokens = _ids(_TEXTS[number])
    yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
    yield RequestAdmitted(request_id=request.request_id, cached=CachedPrefix())
    message = generated(request, 0, tokens)
    logprobs = [TokenLogprobs(logprob=_LOGPROBS[number], top_ids=[], top_logprobs=[])] * len(tokens)
    has_logprobs = request.sampling.top_logprobs is not None
    yield msgspec.structs.replace(message, logprobs=[logprobs] if has_logprobs else [])
    yield finished(request, len(tokens), "stop")


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}])
def test_best_of_returns_choices_with_highest_mean_log_probability(
    gateway: RunningGateway, extra: dict[str, Any]
) -> None:
    """Four completions are generated and counted, the two best are returned, the best first."""
    gateway.scheduler.reply = _reply_by_seed
    body = {"model": "tiny", "prompt": "Count:", "n": 2, "best_of": 4, **extra}

    status, answer, _ = gateway.post(_PATH, body)

    assert status == 200, answer
    assert len(gateway.scheduler.submitted) == 4
    assert [one["text"] for one in answer["choices"]] == ["six seven", "two three"]
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    tokens = sum(len(_ids(text)) for text in _TEXTS)
    assert answer["usage"]["completion_tokens"] == tokens
    shown = [one["logprobs"] for one in answer["choices"]]
    if extra:
        assert shown[0]["token_logprobs"] == [-0.25] * len(_ids("six seven"))
    else:
        assert shown == [None, None]


def test_best_of_chooses_for_each_prompt_with_its_echo(gateway: RunningGateway) -> None:
    """Every prompt gets its own best completion behind its own text."""
    gateway.scheduler.reply = _reply_by_seed
    body = {"model": "tiny", "prompt": ["A: ", "B: "], "best_of": 4, "echo": True}

    status, answer, _ = gateway.post(_PATH, body)

    assert status == 200, answer
    assert [one["text"] for one in answer["choices"]] == ["A: six seven", "B: six seven"]


def test_empty_completion_is_never_the_best(gateway: RunningGateway) -> None:
    """A completion without tokens has no log probability, so any other is better."""

    def reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
        yield from reply_with(_ids("one") if request.request_id.endswith(":1") else [])(request)

    gateway.scheduler.reply = reply
    status, answer, _ = gateway.post(_PATH, {"model": "tiny", "prompt": "A", "best_of": 2})

    assert status == 200, answer
    assert [one["text"] for one in answer["choices"]] == ["one"]


def test_best_of_counts_for_limit_of_choices(gateway: RunningGateway) -> None:
    """Prompts times best_of may be at most 128."""
    body = {"model": "tiny", "prompt": ["A"] * 64, "best_of": 3}
    status, answer, _ = gateway.post(_PATH, body)

    assert status == 400
    assert "128" in answer["error"]["message"]
