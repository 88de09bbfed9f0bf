"""The build id of the installed code, because ranks of different builds must not form a world."""

import hashlib
from importlib import metadata
from pathlib import Path

import shared

_PACKAGES = (Path(__file__).resolve().parents[1], Path(shared.__file__).parent)
_DIGEST_CHARS = 12


def build_id(packages: tuple[Path, ...] = _PACKAGES) -> str:
    """Return the version and a digest of the code that a rank runs.

    The version alone is not enough, because code changes between releases.

    Args:
        packages: folders whose modules the digest covers; reading them takes about 10 ms.
    """
    digest = hashlib.sha256()
    for folder in packages:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{_version()} {digest.hexdigest()[:_DIGEST_CHARS]}"


def _version() -> str:
    try:
        return metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        return "unknown"
