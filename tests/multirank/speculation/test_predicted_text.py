"""Predicted outputs with real ranks: the same text in fewer steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep


def _ask(running: RunningLockstep, **fields: Any) -> tuple[str, dict[str, int]]:
    """Return the text of an answer and its details of the completion."""
    body = {
        "model": "lockstep-demo",
        "messages": [{"role": "user", "content": "What happens when a rank is killed?"}],
        "temperature": 0,
        **fields,
    }
    answer = running.post("/v1/chat/completions", body)
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens_details"]


def test_predicted_answer_is_same_text_with_most_tokens_from_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks a right, an edited and a wrong prediction change no token; accepted and rejected
    drafts are reported."""
    # Drafts in every step, whether or not they pay on this machine.
    monkeypatch.setenv("LOCKSTEP_SPECULATION_ADAPTIVE", "false")
    running = RunningLockstep(tmp_path, 2, "--speculative-method", "ngram")
    try:
        running.wait_until_ready()
        plain, details = _ask(running, speculation="off")
        assert details["accepted_prediction_tokens"] == 0
        words = plain.split(" ")
        edited = " ".join([*words[:3], "perhaps", *words[4:]])
        for predicted in (plain, edited, "Bananas are yellow. " * 20):
            text, _ = _ask(running, prediction={"type": "content", "content": predicted})
            assert text == plain

        _, details = _ask(running, prediction={"type": "content", "content": plain})

        # Prompt lookup alone finds nothing here: the answer is not in the question.
        _, alone = _ask(running)
        assert details["accepted_prediction_tokens"] > alone["accepted_prediction_tokens"] + 10
    finally:
        running.close()
