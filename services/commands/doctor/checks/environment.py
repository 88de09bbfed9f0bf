"""Checks of settings, and of variables that affect results of ranks or their links."""

import hashlib
import re
from collections.abc import Mapping

from services.commands.doctor.facts import Findings
from shared.configuration.host_share import HostShare
from shared.configuration.loading import read_world_files
from shared.configuration.setting_rules import settings_without_effect
from shared.errors import ConfigError

_WATCHED = ("MLX_", "JACCL_", "LOCKSTEP_", "NCCL_", "OMP_NUM_THREADS", "OPENBLAS_")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
_OWN = ("LOCKSTEP_LIFELINE",)
"""Variables that always differ between hosts."""

_RISKY = ("MLX_METAL_FAST_SYNCH", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES")
"""Variables that Lockstep sets itself, for each rank."""

_PER_HOST = re.compile(
    r"LOCKSTEP_(PATHS_|GATEWAY_HOST|CACHE_DIRECTORY|CACHE_STORE_ADDRESS|MODEL_PATH|WORLD_DATA_HOST)"
)
"""Settings that may differ between hosts."""


def watched_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that `lockstep doctor` compares between hosts.

    They are those of MLX, JACCL, NCCL, OpenMP, OpenBLAS and Lockstep.

    Args:
        environment: all environment variables of this process.

    Returns:
        Name -> value, by name. A value whose name indicates a secret is replaced by its digest.
    """
    found = {}
    for name, value in sorted(environment.items()):
        if not name.startswith(_WATCHED) or name.startswith(_OWN):
            continue
        digest = hashlib.blake2b(value.encode(errors="replace"), digest_size=8).hexdigest()
        found[name] = f"digest {digest}" if _SECRET.search(name) else value[:1_000]
    return found


def must_be_equal(name: str) -> bool:
    """Return whether a variable must have the same value on all hosts.

    Secrets, and settings of one host's paths and addresses, may differ.
    """
    # TOKENS counts tokens, and does not name a secret.
    is_secret = _SECRET.search(name.replace("TOKENS", "")) is not None
    return _PER_HOST.match(name) is None and not is_secret


def changes_results(name: str) -> bool:
    """Return whether the variable `name` changes computed results (MLX, JACCL, NCCL).

    Ranks with different values of such a variable would compute different tokens.
    """
    return name.startswith(("MLX_", "JACCL_", "NCCL_"))


def check_settings(found: Findings, share: HostShare) -> None:
    """Check the settings as `lockstep up` does before it starts: risks are WARN, faults FAIL.

    The files of a world over jaccl are examined by another check.

    Args:
        found: collects one finding per fault or risk, else one OK.
        share: settings and roles of this host.
    """
    config, ranks = share.config, len(share.roles.ranks)
    sentences = settings_without_effect(config)
    part = config.rank_worker.memory_share
    if ranks * part > 1.0:
        sentences.append(
            f"rank_worker.memory_share is {part:g}, and {ranks} ranks of this host together would "
            "use more memory than it has."
        )
    if share.roles.scheduler and config.backend != "jaccl":
        try:
            sentences += read_world_files(config).ignored_settings
        except ConfigError as error:
            sentence, _, remedy = str(error).partition(": ")
            found.fail("settings", sentence, remedy)
            return
    for sentence in sentences:
        found.warn("settings", sentence, "change it, or leave it if it is meant")
    if not sentences:
        found.ok("settings", "they fit together")


def check_variables(found: Findings, variables: Mapping[str, str]) -> None:
    """Warn of each variable that Lockstep sets itself for its ranks, such as MLX_RANK.

    Such a variable, set outside, bypasses the settings and the canary. Values are not checked.

    Args:
        found: collects one finding: WARN with the names set, else OK with all names.
        variables: this host's variables, as `watched_variables` returns them.
    """
    risky = [name for name in _RISKY if name in variables]
    if risky:
        found.warn(
            "environment",
            f"{', '.join(risky)} is set, which bypasses the settings and the canary",
            f"`unset {' '.join(risky)}`, also in shell profiles; use world.metal_fast_synch and "
            "the other settings of [world]",
        )
    else:
        found.ok("environment", ", ".join(variables) or "no variable that matters is set")
