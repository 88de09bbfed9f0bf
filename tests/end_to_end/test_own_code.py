"""Models that bring their own Python code, loaded by real rank processes."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from shared import limits
from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.support.captured_process import ROOT

DEMO = ROOT / "models" / "demo"

WORKING_CODE = """
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.tokenizer_utils import AutoTokenizer, TokenizerWrapper

assert AutoTokenizer.from_pretrained
assert TokenizerWrapper.__init__
"""

QUESTION = {
    "messages": [{"role": "user", "content": "What is Lockstep?"}],
    "temperature": 0,
    "max_tokens": 60,
}


FAILING_CODE = """
from mlx_lm.models.qwen3 import Model as Qwen3, ModelArgs


class Model(Qwen3):
    def __call__(self, inputs, cache=None, **others):
        raise NotImplementedError("no caches yet")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo model whose config.json names `model.py`, with remote code trusted. The
    test writes `model.py`."""
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    monkeypatch.setenv("LOCKSTEP_MODEL_TRUST_REMOTE_CODE", "true")
    (tmp_path / "run").mkdir(mode=0o700)
    return folder


@pytest.mark.proof
def test_model_with_custom_code_importing_mlx_lm_answers_requests(folder: Path) -> None:
    """Custom code may import the tokenizers, and the model answers as it does without custom
    code."""
    (folder / "model.py").write_text(WORKING_CODE)
    with running_lockstep(folder.parent / "run", 1, "--model", str(folder)) as running:
        answer = running.post("/v1/chat/completions", {**QUESTION, "model": "own"})

    assert answer["choices"][0]["message"]["content"].startswith("Lockstep is a serving system")


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_error_in_custom_model_code_is_reported_with_file_and_line(
    folder: Path, ranks: int
) -> None:
    """Code that fails in its first step is reported with file and line, and Lockstep does not
    retry."""
    (folder / "model.py").write_text(FAILING_CODE)
    running = RunningLockstep(folder.parent / "run", ranks, "--model", str(folder))
    with contextlib.closing(running):
        assert running.wait(90.0) == limits.EXIT_CONFIG

    assert "before the rank is ready (model.py, line 7); correct the file" in running.text
    assert "NotImplementedError: no caches yet" in running.text
    assert "Traceback" not in running.text
    assert running.text.count("epoch_begins") == 1
