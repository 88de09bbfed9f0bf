"""The file that records for which builds Metal's fast synchronization is proven on this host.

`MLX_METAL_FAST_SYNCH=1` makes a transfer between GPU and network about 40 times faster, but has
returned stale data and hung GPUs on some builds of macOS (mlx issues 3142 and 3830). A proof is
valid only for one build of the system, one MLX version and one device.
"""

import contextlib
import importlib.metadata
import os
import platform
import plistlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from xml.parsers.expat import ExpatError

import msgspec

from shared.errors import ConfigError
from shared.os import private_files, user_folders

VARIABLE = "MLX_METAL_FAST_SYNCH"
FILE_NAME = "fast-synch.json"
BUILDS_MAX = 16
"""Number of builds that the file holds, the latest last."""

_SYSTEM_FILE = Path("/System/Library/CoreServices/SystemVersion.plist")

ProofState = Literal["unproven", "proven"]


def platform_build(device_kind: str, device_name: str, system: str = sys.platform) -> str:
    """Return the build that a proof of fast synchronization is valid for; "" without Metal.

    A build is named by macOS release, kernel, MLX version and device.

    Args:
        device_kind: "metal", "cuda" or "cpu".
        device_name: the device's own name.
        system: the value of `sys.platform`.
    """
    if system != "darwin" or device_kind != "metal":
        return ""
    # Two builds of one release may have the same kernel, and one release several kernels.
    release = f"{platform.mac_ver()[0]} {_system_build()}".strip()
    return f"macOS {release}, {platform.version()}, MLX {mlx_version()}, {device_name}"


def mlx_version() -> str:
    """Return the version of the installed MLX."""
    return importlib.metadata.version("mlx")


def proof_file() -> Path:
    """Return the path of the file that lists the builds proven for fast synchronization.

    It is in this user's cache folder, and lists builds on which a world has computed correctly with
    `MLX_METAL_FAST_SYNCH=1`.
    """
    return user_folders.cache_folder("XDG_CACHE_HOME") / FILE_NAME


def proof_state(path: Path, build: str) -> ProofState:
    """Tell whether a file lists a build as proven to compute correctly with fast synchronization.

    Args:
        path: the file, see `proof_file`.
        build: result of `platform_build`; "" is never proven.

    Returns:
        "proven", or "unproven" if the build is not listed or the file cannot be read.
    """
    return "proven" if build and build in _read_builds(path) else "unproven"


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether MLX_METAL_FAST_SYNCH is "1" in the environment."""
    return environment.get(VARIABLE) == "1"


def record_proof(path: Path, build: str, *, is_proven: bool = True) -> None:
    """Record whether fast synchronization is proven to compute correctly on a build.

    Args:
        path: the file, see `proof_file`.
        build: result of `platform_build`.
        is_proven: a world has computed correctly on it: add it to the file. False: remove it.

    Raises:
        ConfigError: when the folder cannot be written.
    """
    with private_files.locked(path.parent):
        builds = [one for one in _read_builds(path) if one != build]
        if is_proven:
            builds.append(build)
        kept = builds[-BUILDS_MAX:]
        private_files.replace(path, msgspec.json.encode({"proven": kept}).decode() + "\n")


def _read_builds(path: Path) -> list[str]:
    with contextlib.suppress(ConfigError, msgspec.MsgspecError):
        text = private_files.read(path, not_allowed=0o022, remedy="chmod 600")
        return msgspec.json.decode(text, type=dict[str, list[str]]).get("proven", [])
    return []


def _system_build() -> str:
    """Return the build of macOS, such as 25C56; "" when it cannot be read."""
    try:
        with _SYSTEM_FILE.open("rb") as stream:
            return str(plistlib.load(stream).get("ProductBuildVersion", ""))
    except (OSError, ValueError, ExpatError):
        return ""
