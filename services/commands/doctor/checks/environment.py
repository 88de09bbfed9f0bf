"""Variables that change what ranks compute, or how they find each other. Pure."""

import hashlib
import re
from collections.abc import Mapping

from services.commands.doctor.facts import Findings

_WATCHED = ("MLX_", "JACCL_", "LOCKSTEP_", "NCCL_", "OMP_NUM_THREADS", "OPENBLAS_")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
_OWN = ("LOCKSTEP_LIFELINE",)
"""Differ by nature."""

_RISKY = ("MLX_METAL_FAST_SYNCH", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES")
"""Lockstep sets these itself, for each rank."""

_PER_HOST = re.compile(
    r"LOCKSTEP_(PATHS_|GATEWAY_HOST|CACHE_DIRECTORY|CACHE_STORE_ADDRESS|MODEL_PATH|WORLD_DATA_HOST)"
)
"""Settings that hosts may have each in their own way."""


def watched(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what counts, with digests in place of secrets."""
    found = {}
    for name, value in sorted(environment.items()):
        if not name.startswith(_WATCHED) or name.startswith(_OWN):
            continue
        digest = hashlib.blake2b(value.encode(errors="replace"), digest_size=8).hexdigest()
        found[name] = f"digest {digest}" if _SECRET.search(name) else value[:1_000]
    return found


def must_agree(name: str) -> bool:
    """Tell whether a variable must be the same on all hosts: secrets are each host's own."""
    # Settings that count tokens are no secrets.
    is_secret = _SECRET.search(name.replace("TOKENS", "")) is not None
    return _PER_HOST.match(name) is None and not is_secret


def is_computing(name: str) -> bool:
    """Tell whether a variable changes what is computed, so that ranks that differ do not agree."""
    return name.startswith(("MLX_", "JACCL_", "NCCL_"))


def check_here(found: Findings, variables: Mapping[str, str]) -> None:
    """Check this host's variables by themselves; `variables`: from `watched`."""
    risky = [name for name in _RISKY if name in variables]
    if risky:
        found.warn(
            "environment",
            f"{', '.join(risky)} is set, past the settings and the canary",
            f"`unset {' '.join(risky)}`, also in shell profiles; use world.metal_fast_synch and "
            "the other settings of [world]",
        )
    else:
        found.ok("environment", ", ".join(variables) or "nothing is set that counts")
