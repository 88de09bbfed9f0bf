"""Resolution of a model name to a folder."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.model import location


def test_model_name_demo_resolves_to_built_in_folder() -> None:
    """The demo model is a folder with a config, both in a checkout and in a wheel."""
    folder = location.demo_folder()

    assert (folder / "config.json").is_file()
    assert location.local_folder("demo") == folder


def test_model_folder_with_config_json_resolves_to_itself(tmp_path: Path) -> None:
    """A folder with config.json is a model."""
    (tmp_path / "config.json").write_text("{}")

    assert location.local_folder(str(tmp_path)) == tmp_path


def test_hugging_face_model_id_resolves_to_no_folder() -> None:
    """A name of the form owner/name is left to the hub."""
    assert location.local_folder("mlx-community/Qwen3-4B-4bit") is None


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/model", "~/no-such-model", "nowhere"])
def test_model_path_to_missing_folder_is_refused(path: str) -> None:
    """The error for a missing folder says what a model name may be."""
    with pytest.raises(ConfigError, match="no model folder"):
        location.local_folder(path)


def test_model_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    """The error for a folder without config.json names that file."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        location.local_folder(str(tmp_path))
