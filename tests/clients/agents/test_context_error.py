"""The error for a prompt that is too long, as litellm reads it, through which aider asks."""

import subprocess
from pathlib import Path

import pytest

from tests.clients.agents.installation import PYTHON
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway

_ASK = """
import sys, litellm
try:
    litellm.completion(
        model="openai/tiny", api_base=sys.argv[1], api_key="none", num_retries=0,
        messages=[{"role": "user", "content": "word " * 600}],
    )
except litellm.ContextWindowExceededError:
    print("shorten")
"""


@pytest.mark.proof
def test_litellm_knows_that_a_prompt_is_too_long(tmp_path: Path) -> None:
    """Its own error for that lets clients shorten the conversation instead of giving up."""
    folder, run_dir = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    run_dir.mkdir()
    tiny_tokenizer.write_model_folder(folder)
    with RunningGateway.start(folder, run_dir) as gateway:
        asked = subprocess.run(
            [PYTHON, "-c", _ASK, f"{gateway.url}/v1"],
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert asked.stdout.strip().endswith("shorten"), asked.stdout + asked.stderr
