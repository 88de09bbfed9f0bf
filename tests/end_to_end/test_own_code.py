"""A model that brings its own Python code, with real processes."""

import json
import shutil
from pathlib import Path

import pytest

from shared import limits
from tests.captured_process import ROOT
from tests.end_to_end.running_lockstep import RunningLockstep

DEMO = ROOT / "models" / "demo"

CODE = """
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


FAILS = """
from mlx_lm.models.qwen3 import Model as Qwen3, ModelArgs


class Model(Qwen3):
    def __call__(self, inputs, cache=None, **others):
        raise NotImplementedError("no caches yet")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model, which says that it brings `model.py`, and is trusted; none is there yet."""
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    monkeypatch.setenv("LOCKSTEP_MODEL_TRUST_REMOTE_CODE", "true")
    (tmp_path / "run").mkdir()
    return folder


@pytest.mark.proof
def test_a_models_own_code_has_all_of_mlx_lm(folder: Path) -> None:
    """It may import what it likes, tokenizers too, and answers as the same model without code."""
    (folder / "model.py").write_text(CODE)
    running = RunningLockstep(folder.parent / "run", 1, "--model", str(folder))
    try:
        running.wait_until_ready()
        answer = running.post("/v1/chat/completions", {**QUESTION, "model": "own"})
    finally:
        running.close()

    assert answer["choices"][0]["message"]["content"].startswith("Lockstep is a serving system")


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_models_own_code_that_cannot_compute_is_named(folder: Path, ranks: int) -> None:
    """It is built, and its first step fails: a sentence with file and line, and no second try."""
    (folder / "model.py").write_text(FAILS)
    running = RunningLockstep(folder.parent / "run", ranks, "--model", str(folder))
    try:
        assert running.wait(90.0) == limits.EXIT_CONFIG
    finally:
        running.close()

    assert "before the rank is ready (model.py, line 7); correct the file" in running.text
    assert "NotImplementedError: no caches yet" in running.text
    assert "Traceback" not in running.text
    assert running.text.count("epoch_begins") == 1
