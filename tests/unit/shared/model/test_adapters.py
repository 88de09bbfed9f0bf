"""LoRA adapters beside a model: an error or a warning, never silently ignored."""

from pathlib import Path

import pytest

from shared.configuration.loading import config_from_tree
from shared.errors import ConfigError
from shared.model import adapters


def _model(folder: Path, *files: str) -> dict[str, str]:
    for name in files:
        (folder / name).write_text("{}")
    return {"path": str(folder)}


@pytest.mark.parametrize("name", adapters.FILES)
def test_model_with_lora_adapter_is_refused_for_several_ranks(tmp_path: Path, name: str) -> None:
    """The error is raised before the model is read and names `mlx_lm.fuse`."""
    model = _model(tmp_path, "config.json", name)

    with pytest.raises(ConfigError, match=f"{name}.*several ranks.*mlx_lm.fuse"):
        adapters.check(config_from_tree({"model": model, "world": {"size": 2}}))


def test_model_with_lora_adapter_gives_warning_for_one_rank(tmp_path: Path) -> None:
    """The model is served without the adapter, and a sentence says so."""
    model = _model(tmp_path, "config.json", "adapters.safetensors")

    (warning,) = adapters.check(config_from_tree({"model": model}))

    assert "is not used" in warning
    assert "mlx_lm.fuse" in warning


@pytest.mark.parametrize("size", [1, 2])
def test_model_folder_that_contains_only_lora_adapter_is_refused(tmp_path: Path, size: int) -> None:
    """A folder that `mlx_lm.lora` wrote is no model, with any number of ranks."""
    model = _model(tmp_path, "adapter_config.json", "adapters.safetensors")

    with pytest.raises(ConfigError, match="is an adapter"):
        adapters.check(config_from_tree({"model": model, "world": {"size": size}}))


def test_model_without_lora_adapter_gives_no_warning(tmp_path: Path) -> None:
    """Folders, the demo model and Hugging Face ids without adapters give no warning."""
    for path in (_model(tmp_path, "config.json")["path"], "demo", "mlx-community/Qwen3-4B-4bit"):
        assert (
            adapters.check(config_from_tree({"model": {"path": path}, "world": {"size": 2}})) == []
        )


def test_unreadable_model_path_gives_no_lora_adapter_warning(tmp_path: Path) -> None:
    """A path that cannot be read, here because of its length, is reported by the code that loads
    it."""
    path = str(tmp_path / ("x" * 300))

    assert adapters.check(config_from_tree({"model": {"path": path}})) == []
