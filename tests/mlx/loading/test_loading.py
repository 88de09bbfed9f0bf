"""Loading real checkpoints at one rank: what works, and what is refused with one sentence."""

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

from services.rank_worker import collectives
from services.rank_worker.device import hardware
from services.rank_worker.model.loading import loader, origins
from services.rank_worker.model.loading.loader import LoadedModel, load_model
from services.rank_worker.model.loading.source import find_source
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.model.sharding.shares import Split

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
    said: list[tuple[str, float]] = []
    loaded = load_model(
        config,
        find_source(config, 1),
        Split("none", 0, 1),
        collectives.init("off", 0, 1),
        lambda stage, part: said.append((stage, part)),
    )
    return loaded, said


def _types(model: nn.Module) -> set[mx.Dtype]:
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return {value.dtype for value in weights.values()}


def test_a_model_without_tokenizer_loads_with_progress(folder: Path) -> None:
    """Ranks know no text; progress goes from 0 to 1 and never back."""
    loaded, said = _load(folder)
    logits = loaded.model(mx.array([[1, 2, 3]]))

    assert logits.shape == (1, 3, 96)
    assert loaded.context_tokens_max == 256
    assert {stage for stage, _ in said} == {"loading"}
    assert [part for _, part in said] == sorted(part for _, part in said)
    assert (said[0][1], said[-1][1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("asked", "on_cpu"),
    [("float32", mx.float32), ("float16", mx.float16), ("auto", mx.float32)],
)
def test_weights_have_the_type_that_was_asked_for(
    folder: Path, asked: str, on_cpu: mx.Dtype
) -> None:
    """ "auto" on the CPU is float32, elsewhere the checkpoint's."""
    loaded, _ = _load(folder, dtype=asked)
    on_gpu = mx.bfloat16 if asked == "auto" else on_cpu
    is_cpu = mx.default_device().type == mx.DeviceType.cpu

    assert _types(loaded.model) == {on_cpu if is_cpu else on_gpu}


def test_a_quantized_model_loads(folder: Path) -> None:
    """Quantized weights stay packed; what is not quantized follows the setting."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    nn.quantize(model, group_size=32, bits=4)
    config = {**CONFIG, "quantization": {"group_size": 32, "bits": 4}}
    _save(model, folder, config)
    loaded, _ = _load(folder, dtype="float32")

    assert _types(loaded.model) == {mx.uint32, mx.float32}
    assert mx.all(mx.isfinite(loaded.model(mx.array([[1, 2]])))).item()


def test_equal_settings_give_equal_fingerprints(folder: Path) -> None:
    """What makes the computation another makes the fingerprint another."""
    first, again = _load(folder)[0], _load(folder)[0]
    other = _load(folder, dtype="float16")[0]

    assert first.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such_family"}, 'does not support models of type "no_such_family"'),
        ({"num_hidden_layers": 3}, r"do not fit its config \(qwen3\)"),
        ({"hidden_size": 48}, r"do not fit its config \(qwen3\)"),
        ({"hidden_size": None}, r"do not fit its config \(qwen3\)"),
        ({"model_file": "model.py"}, "set model.trust_remote_code to true"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    """Unknown families, missing or misshapen weights and foreign code: one sentence each."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ConfigError, match=words) as caught:
        _load(folder)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "AttributeError: .*Model"),
        ("def (", "SyntaxError: "),
        ("import no_such_package", "ModuleNotFoundError: .*no_such_package"),
        ("assert 1 == 2, 'needs two heads'", "AssertionError: needs two heads"),
        ("raise SystemExit('needs torch')", "SystemExit: needs torch"),
        (None, "FileNotFoundError: .*model.py"),
    ],
)
def test_a_models_own_code_that_fails_is_named(folder: Path, code: str | None, words: str) -> None:
    """One sentence with the file and what it raised, whatever that is."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_file": "model.py"}))
    if code is not None:
        (folder / "model.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"own code \(model.py\), or .*: {words}") as caught:
        _load(folder, trust_remote_code=True)

    assert "\n" not in str(caught.value)


def _spoil_once_traced(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Cut a weight file off between looking at it and reading it."""
    real = origins.find_origins

    def traced(*given: Any) -> Any:
        found = real(*given)
        with path.open("rb+") as stream:
            stream.truncate(path.stat().st_size - 100)
        return found

    patch.setattr(loader, "find_origins", traced)


def test_a_file_that_is_cut_off_while_it_is_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What MLX's threads meet while they read becomes a sentence in the main thread."""
    path = folder / "model.safetensors"
    _spoil_once_traced(monkeypatch, path)

    with pytest.raises(ConfigError, match=f"{path} changed while it was read"):
        _load(folder)


def test_a_process_that_could_not_load_ends_as_it_wants(folder: Path) -> None:
    """No thread of MLX is left that would end it with a signal instead."""
    code = (
        "import sys, pytest, tests.mlx.loading.test_loading as here, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "here._load(folder)\n"
        "with pytest.MonkeyPatch.context() as patch:\n"
        "    here._spoil_once_traced(patch, folder / 'model.safetensors')\n"
        "    try:\n"
        "        here._load(folder)\n"
        "    except here.ConfigError as error:\n"
        "        sys.exit(error.exit_code)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)

    assert done.returncode == ConfigError.exit_code, done.stderr.decode()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Before anything else happens."""
    with pytest.raises(ConfigError, match="There is no model folder"):
        _load(tmp_path / "nothing")


def test_free_memory_is_shared_by_the_ranks_of_a_host() -> None:
    """Two CPU ranks may plan with half each."""
    here = hardware.describe_device()
    alone, shared = hardware.free_bytes(here, 1), hardware.free_bytes(here, 2)

    assert here.name
    assert 0 < shared <= alone <= here.memory_bytes * 1.1
