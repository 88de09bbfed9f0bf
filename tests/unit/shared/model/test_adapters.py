"""LoRA adapters are never silently left out."""

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
def test_an_adapter_and_several_ranks(tmp_path: Path, name: str) -> None:
    """Refused before anything is read, with the way to a model that has it built in."""
    model = _model(tmp_path, "config.json", name)

    with pytest.raises(ConfigError, match=f"{name}.*several ranks.*mlx_lm.fuse"):
        adapters.check(config_from_tree({"model": model, "world": {"size": 2}}))


def test_an_adapter_and_one_rank(tmp_path: Path) -> None:
    """The model is served without it, and that is said."""
    model = _model(tmp_path, "config.json", "adapters.safetensors")

    (said,) = adapters.check(config_from_tree({"model": model}))

    assert "is not used" in said
    assert "mlx_lm.fuse" in said


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_is_an_adapter_only(tmp_path: Path, size: int) -> None:
    """What mlx_lm.lora writes is no model, with any number of ranks."""
    model = _model(tmp_path, "adapter_config.json", "adapters.safetensors")

    with pytest.raises(ConfigError, match="is an adapter"):
        adapters.check(config_from_tree({"model": model, "world": {"size": size}}))


def test_a_model_without_an_adapter(tmp_path: Path) -> None:
    """Folders, the demo and Hugging Face ids are nothing to talk about."""
    for path in (_model(tmp_path, "config.json")["path"], "demo", "mlx-community/Qwen3-4B-4bit"):
        assert (
            adapters.check(config_from_tree({"model": {"path": path}, "world": {"size": 2}})) == []
        )


def test_a_folder_that_nobody_may_enter_is_not_looked_into(tmp_path: Path) -> None:
    """Whoever loads the model says why it cannot be read; here a name too long for any file."""
    path = str(tmp_path / ("x" * 300))

    assert adapters.check(config_from_tree({"model": {"path": path}})) == []
