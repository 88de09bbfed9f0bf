"""Build id of a rank: equal code has an equal id."""

import shutil
from pathlib import Path

from services.rank_worker.joining import code_version


def _package(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "one.py").write_text("ONE = 1\n")
    (folder / "inner" / "two.py").write_text("TWO = 2\n")
    return folder


def test_build_id_changes_only_when_python_modules_change(tmp_path: Path) -> None:
    """The id depends on the contents and places of modules, not on the folder or other files."""
    here = _package(tmp_path / "here")
    there = Path(shutil.copytree(here, tmp_path / "elsewhere" / "there"))
    (there / "notes.txt").write_text("not run")
    name = code_version.build_id((here,))
    assert code_version.build_id((there,)) == name

    (there / "inner" / "two.py").write_text("TWO = 3\n")
    changed = code_version.build_id((there,))
    (there / "inner" / "two.py").write_text("TWO = 2\n")
    (there / "inner" / "two.py").rename(there / "two.py")
    moved = code_version.build_id((there,))
    assert len({name, changed, moved}) == 3


def test_build_id_is_version_and_digest_of_code() -> None:
    """The id is the version and a digest of the code."""
    version, digest = code_version.build_id().split(" ")
    assert version[0].isdigit()
    assert len(digest) == 12
    assert code_version.build_id() == f"{version} {digest}"
