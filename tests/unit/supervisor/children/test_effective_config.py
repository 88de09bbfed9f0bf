"""The merged configuration that children read says exactly what the supervisor was told."""

import stat
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.supervisor.children import effective_config
from shared.configuration.loading import config_from_tree, load_config
from shared.configuration.settings import Config
from tests.effort import cases

_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(max_examples=cases(40, 200))
@given(path=_TEXT, name=_TEXT, stall_ms=st.floats(1.0, 60_000.0), remote=st.booleans())
def test_children_read_the_same(path: str, name: str, stall_ms: float, remote: bool) -> None:
    """Any text and number survives the file, control characters and quotes too."""
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


def test_the_run_folder_is_pinned() -> None:
    """Children do not work out the run folder again: their TMPDIR might differ."""
    config = load_config(flags={"gateway.port": "9123"})

    assert _read(effective_config.as_toml(config)).paths.run_dir == str(config.run_dir)


def test_the_file_is_private(tmp_path: Path) -> None:
    """Mode 0600, also when an older file with another mode lies there."""
    (tmp_path / effective_config.FILE_NAME).write_text("old")
    (tmp_path / effective_config.FILE_NAME).chmod(0o644)

    path = effective_config.write(Config(), tmp_path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_config(str(path)).gateway == Config().gateway


def test_overrides_do_not_reach_children_twice() -> None:
    """A variable that lost against a flag must not win in the child; the rest is handed down."""
    environment = {"LOCKSTEP_WORLD_SIZE": "1", "PATH": "/bin", "HF_HOME": "/models"}

    assert effective_config.without_overrides(environment) == {
        "PATH": "/bin",
        "HF_HOME": "/models",
    }
