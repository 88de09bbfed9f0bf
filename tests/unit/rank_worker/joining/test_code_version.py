"""Which Lockstep a rank runs: equal code, equal name."""

import shutil
from pathlib import Path

from services.rank_worker.joining import code_version


def _package(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "one.py").write_text("ONE = 1\n")
    (folder / "inner" / "two.py").write_text("TWO = 2\n")
    return folder


def test_copies_have_one_name_and_any_change_another(tmp_path: Path) -> None:
    """Where it is installed does not count, nor what is no module; what and where code is, does."""
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


def test_it_names_the_version_too() -> None:
    """What a person sees first is the release; the digest is of the ranks' own code."""
    version, digest = code_version.build_id().split(" ")
    assert version[0].isdigit()
    assert len(digest) == 12
    assert code_version.build_id() == f"{version} {digest}"
