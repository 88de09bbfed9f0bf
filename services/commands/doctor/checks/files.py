"""Checks of keys, model, disk space and the limit of open files."""

import json
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path

from services.commands.doctor.facts import Findings
from shared.configuration.settings import Config
from shared.errors import LockstepError
from shared.model import checkpoint_files
from shared.model.checkpoint_files import WeightFile
from shared.model.fingerprint import model_fingerprint
from shared.model.location import local_folder
from shared.transport import keys

GIB = 2**30
ROOM_MIN = 10 * GIB
"""Free bytes wanted on the disk of stored blocks, if no limit of their bytes is set."""
FILES_SPARE = 256
"""Open files in addition to those of clients."""

_FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
"""Type that loading may cast, as safetensors names it -> bytes of a number."""
_CAST_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""`model.dtype` -> bytes of a number."""


def check_keys(
    found: Findings, folder: Path, *, needed: bool, flags: str = ""
) -> tuple[str, dict[str, list[str]]]:
    """Check that this host's key pair and its list of allowed keys can be read.

    Args:
        found: collects one finding; it is a FAIL when a file cannot be read, is malformed, or is
            missing although needed.
        folder: folder of the keys.
        needed: whether links to other hosts need keys; if not, a missing pair is OK.
        flags: flags with which commands find these settings, for the text of remedies.

    Returns:
        (public key, allowed public key -> its roles); ("", {}) without a usable pair.
    """
    try:
        secret, public = keys.read_secret(folder), keys.read_public(folder)
        allowed = keys.read_allowed(folder)
    except LockstepError as error:
        sentence, _, remedy = str(error).partition(": ")
        found.fail("keys", sentence, remedy or f"look at {folder}")
        return "", {}
    if secret is None or public is None:
        if needed:
            found.fail("keys", f"there is no key pair in {folder}", f"`lockstep keys new{flags}`")
        else:
            found.ok("keys", "no keys, and none are needed: all links stay on this host")
        return "", {}
    if not keys.is_key(public):
        found.fail(
            "keys",
            f"{folder / keys.PUBLIC_FILE} does not hold a key",
            f"`lockstep keys new{flags} --force`",
        )
        return "", {}
    found.ok("keys", f"a key pair and {len(allowed)} allowed keys in {folder}")
    return public, {key: sorted(peer.roles) for key, peer in allowed.items()}


def check_model(found: Findings, config: Config) -> tuple[str, list[WeightFile] | None]:
    """Check that the model's config and the headers of all its weight files can be read here.

    An id of Hugging Face that is not downloaded yet gives CANNOT CHECK, a missing or damaged model
    gives FAIL.

    Args:
        found: collects one finding.
        config: names the model.

    Returns:
        (digest of config and headers, weight files), or ("", None) if the model is not here.
    """
    path = config.model.path
    try:
        folder = local_folder(path)
        if folder is None:
            found.cannot_check(
                "model",
                f"{path} is a Hugging Face id: the host of each rank downloads it at its start",
                f"`hf download {path}` on every host downloads it in advance",
            )
            return "", None
        facts = checkpoint_files.read_config(folder)
        files = checkpoint_files.weight_files(folder)
        digest = model_fingerprint(facts, files, dtype="any", world_size=0, sharding="any")
    except LockstepError as error:
        sentence, _, remedy = str(error).partition(": ")
        found.fail("model", sentence, remedy or "download the model again")
        return "", None
    except OSError as error:
        found.fail("model", f"{path} cannot be read: {error.strerror}", "correct its permissions")
        return "", None
    size = bytes_in_memory(files, "auto")
    found.ok("model", f"{folder}: {len(files)} files, {size / GIB:.2f} GiB of weights")
    return digest, files


def bytes_in_memory(files: Iterable[WeightFile], dtype: str) -> int:
    """Return the total bytes of all weights in memory after loading.

    Args:
        files: from `check_model`.
        dtype: type to which floating-point numbers are cast; "auto": no cast.
    """
    return sum(_payload_bytes(file, dtype) for file in files)


def check_disk(found: Findings, config: Config) -> None:
    """Compare the free space of the disk of stored blocks with `cache.ssd_bytes_max`.

    Without that limit it is compared with 10 GiB. Less free space is a WARN; nothing is checked
    when the cache stores nothing on SSD.
    """
    if not (config.cache.enabled and config.cache.ssd):
        return
    folder = config.cache_directory
    try:
        place = next(one for one in (folder, *folder.parents) if one.is_dir())
        free = shutil.disk_usage(place).free
    except (OSError, StopIteration):
        found.cannot_check("disk", f"the free space of {folder} is unknown", "set cache.directory")
        return
    wanted = config.cache.ssd_bytes_max or ROOM_MIN
    if free < wanted:
        found.warn(
            "disk",
            f"{free / GIB:.1f} GiB are free for blocks in {folder}, {wanted / GIB:.1f} GiB wanted",
            "free some space, lower cache.ssd_bytes_max, or set cache.directory to another disk",
        )
    else:
        found.ok("disk", f"{free / GIB:.1f} GiB are free for blocks in {folder}")


def check_limits(found: Findings, config: Config, *, gateway: bool) -> None:
    """Check that the hard limit of open files per process is high enough; else FAIL.

    It must allow 256 files, and in a gateway one more per open request. A gateway raises its soft
    limit itself, so that limit is only reported.

    Args:
        found: collects one finding.
        config: gives a gateway's limit of open requests.
        gateway: whether a gateway runs here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = hard if hard != resource.RLIM_INFINITY else 2**31
    wanted = FILES_SPARE + (config.gateway.open_requests_max if gateway else 0)
    if highest < wanted:
        found.fail(
            "open files",
            f"a process may open {highest:,} files, and {wanted:,} are needed",
            "`sudo launchctl limit maxfiles 65536 unlimited` on macOS, LimitNOFILE= of the unit or "
            "`ulimit -Hn` on Linux; or lower gateway.open_requests_max",
        )
    else:
        found.ok("open files", f"{soft:,}, up to {highest:,}")


def _payload_bytes(file: WeightFile, dtype: str) -> int:
    tensors = json.loads(file.header)
    tensors.pop("__metadata__", None)
    total = 0
    for one in tensors.values():
        size = one["data_offsets"][1] - one["data_offsets"][0]
        stored = _FLOAT_BYTES.get(one["dtype"])
        is_cast = stored is not None and dtype in _CAST_BYTES
        total += size // stored * _CAST_BYTES[dtype] if is_cast else size
    return total
