"""A model that brings its own Python code, with real processes."""

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep
from tests.printing import ROOT

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


def test_a_models_own_code_has_all_of_mlx_lm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may import what it likes, tokenizers too, and answers as the same model without code."""
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    (folder / "model.py").write_text(CODE)
    monkeypatch.setenv("LOCKSTEP_MODEL_TRUST_REMOTE_CODE", "true")
    (tmp_path / "run").mkdir()
    running = RunningLockstep(tmp_path / "run", 1, "--model", str(folder))
    try:
        running.wait_until_ready()
        answer = running.post("/v1/chat/completions", {**QUESTION, "model": "own"})
    finally:
        running.close()

    assert answer["choices"][0]["message"]["content"].startswith("Lockstep is a serving system")
