"""Loading of checkpoints at one rank: dtypes, fingerprints and refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from services.rank_worker.device import hardware
from services.rank_worker.model.loading import loader, origins
from services.rank_worker.model.loading.loader import LoadedModel, open_model
from services.rank_worker.model.loading.source import find_source
from services.rank_worker.peers import collectives
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.model.sharding.shares import Split
from tests.support.waiting import PROCESS_DEADLINE_S

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a checkpoint with random bfloat16 weights and no tokenizer."""
    mx.random.seed(3)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.bfloat16)
    _save(model, tmp_path, CONFIG)
    return tmp_path


def _save(model: nn.Module, folder: Path, config: dict[str, Any]) -> None:
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))


def _load(folder: Path, **settings: Any) -> tuple[LoadedModel, list[tuple[str, float]]]:
    config = ModelConfig(path=str(folder), **settings)
    progress: list[tuple[str, float]] = []

    def report(stage: str, part: float) -> None:
        progress.append((stage, part))

    split, world = Split("none", 0, 1), collectives.init("off", 0, 1)
    opened = open_model(config, find_source(config, 1), split, world, report)
    return opened.read(report), progress


def _types(model: nn.Module) -> set[mx.Dtype]:
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return {value.dtype for value in weights.values()}


def test_model_without_tokenizer_loads_with_rising_progress(folder: Path) -> None:
    """A rank needs no tokenizer; the progress rises from 0 to 1."""
    loaded, progress = _load(folder)
    logits = loaded.model(mx.array([[1, 2, 3]]))

    assert logits.shape == (1, 3, 96)
    assert loaded.context_tokens_max == 256
    assert {stage for stage, _ in progress} == {"loading"}
    assert [part for _, part in progress] == sorted(part for _, part in progress)
    assert (progress[0][1], progress[-1][1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("asked", "on_cpu"),
    [("float32", mx.float32), ("float16", mx.float16), ("auto", mx.float32)],
)
def test_loaded_weights_have_configured_dtype(folder: Path, asked: str, on_cpu: mx.Dtype) -> None:
    """Weights have the configured dtype; "auto" is float32 on the CPU, else the dtype of the
    file.
    """
    loaded, _ = _load(folder, dtype=asked)
    on_gpu = mx.bfloat16 if asked == "auto" else on_cpu
    is_cpu = mx.default_device().type == mx.DeviceType.cpu

    assert _types(loaded.model) == {on_cpu if is_cpu else on_gpu}


def test_quantized_weights_stay_packed_after_loading(folder: Path) -> None:
    """Quantized weights stay packed; other weights have the configured dtype."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    nn.quantize(model, group_size=32, bits=4)
    config = {**CONFIG, "quantization": {"group_size": 32, "bits": 4}}
    _save(model, folder, config)
    loaded, _ = _load(folder, dtype="float32")

    assert _types(loaded.model) == {mx.uint32, mx.float32}
    assert mx.all(mx.isfinite(loaded.model(mx.array([[1, 2]])))).item()


def test_model_fingerprint_differs_when_dtype_differs(folder: Path) -> None:
    """Equal settings give equal fingerprints; another dtype gives another one."""
    first, again = _load(folder)[0], _load(folder)[0]
    other = _load(folder, dtype="float16")[0]

    assert first.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_family"}, 'does not support models of type "no_such_family"'),
        ({"num_hidden_layers": 3}, r"do not fit its config \(qwen3\)"),
        ({"hidden_size": 48}, r"do not fit its config \(qwen3\)"),
        ({"hidden_size": None}, r"do not fit its config \(qwen3\)"),
        ({"model_file": "model.py"}, "set model.trust_remote_code to true"),
    ],
)
def test_model_config_not_fitting_weights_is_refused_in_one_line(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    """Unknown families, missing or misshapen weights and untrusted code are refused in one line."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        _load(folder)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "AttributeError: .*Model"),
        ("def (", "SyntaxError: "),
        ("import no_such_package", "ModuleNotFoundError: .*no_such_package"),
        ("assert 1 == 2, 'needs two heads'", "AssertionError: needs two heads"),
        ("raise SystemExit('needs torch')", "SystemExit: needs torch"),
        (None, "FileNotFoundError: .*model.py"),
    ],
)
def test_error_in_model_python_file_is_reported_with_file_name(
    folder: Path, code: str | None, message: str
) -> None:
    """An error in the Python file of a model is reported in one line with file and cause."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_file": "model.py"}))
    if code is not None:
        (folder / "model.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"own code \(model.py\), or .*: {message}") as caught:
        _load(folder, trust_remote_code=True)

    assert "\n" not in str(caught.value)


def _truncate_after_planning(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Truncate a weight file after its headers are read and before its weights are."""
    real = origins.find_origins

    def traced(*given: Any) -> Any:
        found = real(*given)
        with path.open("rb+") as stream:
            stream.truncate(path.stat().st_size - 100)
        return found

    patch.setattr(loader, "find_origins", traced)


def test_weight_file_truncated_during_read_raises_config_error_naming_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error in a thread of MLX becomes a ConfigError in the main thread."""
    path = folder / "model.safetensors"
    _truncate_after_planning(monkeypatch, path)

    with pytest.raises(ConfigError, match=f"{path} changed while it was read"):
        _load(folder)


def test_process_exits_with_configuration_error_code_after_failed_load(folder: Path) -> None:
    """After a failed load the process exits with the code of the error; no thread of MLX ends it
    with a signal.
    """
    code = (
        "import sys, pytest, tests.mlx.loading.test_loading as here, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "here._load(folder)\n"
        "with pytest.MonkeyPatch.context() as patch:\n"
        "    here._truncate_after_planning(patch, folder / 'model.safetensors')\n"
        "    try:\n"
        "        here._load(folder)\n"
        "    except here.ConfigError as error:\n"
        "        sys.exit(error.exit_code)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=PROCESS_DEADLINE_S)

    assert done.returncode == ConfigError.exit_code, done.stderr.decode()


def test_missing_model_folder_is_refused_before_loading(tmp_path: Path) -> None:
    """A model folder that does not exist is refused first."""
    with pytest.raises(ConfigError, match="There is no model folder"):
        _load(tmp_path / "nothing")


def test_free_memory_per_cpu_rank_does_not_grow_with_ranks_on_host() -> None:
    """The free memory of a CPU rank is no larger when a second rank runs on the host."""
    here = hardware.describe_device()
    alone, shared = hardware.free_bytes(here, 1), hardware.free_bytes(here, 2)

    assert here.name
    assert 0 < shared <= alone <= here.memory_bytes * 1.1
