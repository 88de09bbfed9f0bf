"""Where a model's files are, and how a name that leads nowhere is refused."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.model import location


def test_the_demo_model_is_found() -> None:
    """The built-in model is a folder with a configuration, in a checkout as in a wheel."""
    folder = location.demo_folder()

    assert (folder / "config.json").is_file()
    assert location.local_folder("demo") == folder


def test_a_local_folder_is_found(tmp_path: Path) -> None:
    """A folder with config.json is a model."""
    (tmp_path / "config.json").write_text("{}")

    assert location.local_folder(str(tmp_path)) == tmp_path


def test_a_hugging_face_id_is_no_folder() -> None:
    """owner/name is left to the hub."""
    assert location.local_folder("mlx-community/Qwen3-4B-4bit") is None


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/model", "~/no-such-model", "nowhere"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    """What looks like a path and is none is an error that says what a model may be."""
    with pytest.raises(ConfigError, match="no model folder"):
        location.local_folder(path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """A folder without config.json is named."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        location.local_folder(str(tmp_path))
