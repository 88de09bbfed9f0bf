"""Which Lockstep a rank runs: equal code, equal name."""

import shutil
from pathlib import Path

from services.rank_worker import own_code


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
    name = own_code.name((here,))
    assert own_code.name((there,)) == name

    (there / "inner" / "two.py").write_text("TWO = 3\n")
    changed = own_code.name((there,))
    (there / "inner" / "two.py").write_text("TWO = 2\n")
    (there / "inner" / "two.py").rename(there / "two.py")
    moved = own_code.name((there,))
    assert len({name, changed, moved}) == 3


def test_it_names_the_version_too() -> None:
    """What a person sees first is the release; the digest is of the ranks' own code."""
    version, digest = own_code.name().split(" ")
    assert version[0].isdigit()
    assert len(digest) == 12
    assert own_code.name() == f"{version} {digest}"
