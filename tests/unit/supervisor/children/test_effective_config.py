"""The merged configuration file that the supervisor writes for its children."""

import shutil
import stat
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.supervisor.children import effective_config
from shared.configuration.loading import config_from_tree, load_config
from shared.configuration.settings import Config
from tests.support.effort import cases

_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(max_examples=cases(40, 200))
@given(path=_TEXT, name=_TEXT, stall_ms=st.floats(1.0, 60_000.0), remote=st.booleans())
def test_config_file_written_for_children_is_read_back_unchanged(
    path: str, name: str, stall_ms: float, remote: bool
) -> None:
    """Any text and number is read back unchanged, including control characters and quotes."""
    tree = {
        "paths": {"run_dir": "/tmp/x"},
        "model": {"path": path, "served_name": name, "trust_remote_code": remote},
        "scheduler": {"decode_stall_ms": stall_ms},
    }
    config = config_from_tree(tree)

    text = effective_config.as_toml(config)

    assert _read(text) == config


def _read(text: str) -> Config:
    return config_from_tree(msgspec.toml.decode(text))


def test_config_file_written_for_children_contains_run_folder() -> None:
    """Children do not derive the run folder again, because their home folder might differ."""
    config = load_config(flags={"gateway.port": "9123"})

    assert _read(effective_config.as_toml(config)).paths.run_dir == str(config.run_dir)


def test_config_file_written_for_children_has_mode_0600(tmp_path: Path) -> None:
    """An older file with another mode gets the mode too."""
    (tmp_path / effective_config.FILE_NAME).write_text("old")
    (tmp_path / effective_config.FILE_NAME).chmod(0o644)

    files = effective_config.RunFiles(Config(), tmp_path)
    files.restore()
    path = files.config_file

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_config(str(path)).gateway == Config().gateway


def test_files_of_children_are_restored_when_deleted_or_changed(tmp_path: Path) -> None:
    """The settings and the hostfile's content come from memory, even if the whole run folder and
    the user's own hostfile are gone."""
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text('{"hosts": [{"ips": ["10.0.0.1"]}, {"ips": ["10.0.0.2"]}]}')
    text = hostfile.read_text()
    folder = tmp_path / "run"
    files = effective_config.RunFiles(
        load_config(flags={"world.hostfile": str(hostfile), "paths.run_dir": str(folder)}),
        folder,
        {str(folder / "further.json"): "{}"},
    )
    files.restore()
    expected = files.config_file.read_text()
    files.config_file.write_text("changed")
    files.restore()
    assert files.config_file.read_text() == expected

    hostfile.unlink()
    shutil.rmtree(folder)
    files.restore()

    read = load_config(str(files.config_file))
    assert Path(read.world.hostfile).read_text() == text
    assert read.world.size == 2
    assert (folder / "further.json").read_text() == "{}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_environment_of_child_process_contains_no_setting_variables() -> None:
    """A variable that a flag has overridden must not take effect in the child; other variables
    remain."""
    environment = {"LOCKSTEP_WORLD_SIZE": "1", "PATH": "/bin", "HF_HOME": "/models"}

    assert effective_config.without_overrides(environment) == {
        "PATH": "/bin",
        "HF_HOME": "/models",
    }
