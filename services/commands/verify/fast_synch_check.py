"""Check whether Metal's fast synchronization is proven on this host (`--fast-synch`).

A rank writes the proof once its world has passed the canary and computed a step with the variable
set. So the trial is a start with `world.metal_fast_synch = "on"`, and this check reads its result.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from services.commands.verify import judging
from services.commands.verify.judging import TimedCheck
from shared.messages import RankStatus
from shared.os import fast_synch

Setting = Literal["auto", "on", "off"]


def judge_fast_synch(
    setting: Setting, ranks: Sequence[RankStatus], host: str, path: Path, system: str
) -> TimedCheck:
    """Judge whether MLX_METAL_FAST_SYNCH=1 is recorded as proven for the ranks of this host.

    A proof is an entry in a file of this host, one per combination of macOS build, MLX version and
    GPU. A rank adds it after its world has passed the canary and run a step with that variable set.

    SKIP if no rank here computes on Metal; FAIL if this Lockstep was started with another setting
    than "on", or a rank's combination has no entry; else PASS.

    Args:
        setting: value of `world.metal_fast_synch` in the running Lockstep.
        ranks: status of every rank of the running world; those of other hosts are ignored.
        host: this machine's name, as ranks report it.
        path: the file of proofs.
        system: name of the platform, as in `sys.platform`.
    """
    name = judging.FAST_SYNCH
    builds = [_build(rank, system) for rank in ranks if rank.host == host]
    if not any(builds):
        return judging.skipped(name, "no rank on this host computes on Metal")
    if setting != "on":
        return judging.failed(
            name,
            f"this start did not try it (world.metal_fast_synch is {setting})",
            "Start with LOCKSTEP_WORLD_METAL_FAST_SYNCH=on on every host, run this again, then "
            'set it back to "auto".',
        )
    if not all(fast_synch.proof_state(path, build) == "proven" for build in builds):
        return judging.failed(
            name,
            f"no proof of this build in {path}",
            "The world must have passed its canary (world.canary on, two ranks or more) and "
            "answered a request: look for fast_synch in the ranks' log.",
        )
    note = "Each host keeps its own proof: run this on the other hosts too."
    return judging.passed(name, f"proven for {builds[0]}", [note])


def _build(rank: RankStatus, system: str) -> str:
    kind, _, name = rank.device.partition(" ")
    return fast_synch.platform_build(kind, name, system)
