"""Start: invalid settings end the process with exit code 78 and one sentence."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gateway.running_gateway import start_error
from tests.support.ports import free_port


def _settings(model_folder: Path, run_dir: Path, port: int = 0) -> dict[str, Any]:
    return {
        "model": {"path": str(model_folder)},
        "paths": {"run_dir": str(run_dir)},
        "gateway": {"port": port or free_port()},
    }


def test_gateway_exits_with_78_when_port_is_in_use(model_folder: Path, tmp_path: Path) -> None:
    """The message names the address and the setting."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = start_error(_settings(model_folder, tmp_path, port=port))
    assert f"127.0.0.1:{port}" in text
    assert "gateway.port" in text


def test_gateway_exits_with_78_when_model_folder_is_missing(tmp_path: Path) -> None:
    """A missing model folder and one without a tokenizer are errors."""
    assert "There is no model folder" in start_error(_settings(tmp_path / "none", tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert "tokenizer" in start_error(_settings(tmp_path, tmp_path))


def test_gateway_modules_load_where_mlx_is_not_installed(model_folder: Path) -> None:
    """The gateway's modules and the tokenizer load where MLX is not installed."""
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "from services.gateway import main\n"
        "from services.gateway.tokenizing import tokenizer\n"
        "from shared.configuration.settings import ModelConfig\n"
        "print(tokenizer.load(ModelConfig(path=sys.argv[1])).encode_text('Hello'))"
    )
    root = Path(__file__).resolve().parents[3]
    completed = subprocess.run(
        [sys.executable, "-c", code, str(model_folder)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("[")
