"""Starting: what cannot work ends with exit code 78 and one sentence, before anything is served."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gateway.running_gateway import launch
from tests.ports import free_port


def _fails(settings: dict[str, Any]) -> str:
    with launch(settings) as process:
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    text = errors.decode()
    assert process.returncode == 78, text
    assert "Traceback" not in text
    return text


def _settings(model_folder: Path, run_dir: Path, port: int = 0) -> dict[str, Any]:
    return {
        "model": {"path": str(model_folder)},
        "paths": {"run_dir": str(run_dir)},
        "gateway": {"port": port or free_port()},
    }


def test_a_port_in_use_is_named(model_folder: Path, tmp_path: Path) -> None:
    """The sentence names the address and the setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = _fails(_settings(model_folder, tmp_path, port=port))
    assert f"127.0.0.1:{port}" in text
    assert "gateway.port" in text


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """A folder that does not exist, and one without a tokenizer."""
    assert "There is no model folder" in _fails(_settings(tmp_path / "none", tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert "tokenizer" in _fails(_settings(tmp_path, tmp_path))


def test_the_gateway_needs_no_mlx(model_folder: Path) -> None:
    """It starts where MLX is not installed: nothing of it is imported."""
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "from services.gateway import main\n"
        "from services.gateway.tokenizing import tokenizer\n"
        "from shared.configuration.settings import ModelConfig\n"
        "print(tokenizer.load(ModelConfig(path=sys.argv[1])).encode_text('Hello'))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(model_folder)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")
