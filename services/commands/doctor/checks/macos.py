"""Checks of a Mac: version, energy settings, memory."""

from services.commands.doctor.facts import Findings
from services.commands.doctor.reading import macos
from services.commands.doctor.system_commands import CommandOutcome

GIB = 2**30
WIRED_PART = 0.15
WIRED_BYTES = 4 * GIB
"""macOS itself wires less than the larger of the two."""
FREE_PART_MIN = 0.2
"""Least share of free memory that is no finding."""


def check_system(found: Findings, said: CommandOutcome) -> str:
    """Report the version of macOS; every version is OK.

    Args:
        found: collects one finding.
        said: outcome of `sw_vers`.

    Returns:
        Version and build, such as "26.2 (25C56)"; "" if the command shows none.
    """
    version = macos.read_sw_vers(said.text) if said.ok else None
    if version is None:
        found.cannot_check("system", f"`sw_vers` gives no version: {said.why}", "run it by hand")
        return ""
    found.ok("system", f"macOS {version[0]} ({version[1]})")
    return f"{version[0]} ({version[1]})"


def check_chip(found: Findings, said: CommandOutcome) -> str:
    """Check that the chip's name begins with "Apple M"; else FAIL.

    Args:
        found: collects one finding.
        said: outcome of `sysctl -n machdep.cpu.brand_string`.

    Returns:
        The name of the chip; "" if the command shows none.
    """
    name = said.text.strip()[:64]
    if not said.ok or not name:
        found.cannot_check("chip", f"the name of the chip is unknown: {said.why}")
    elif name.startswith("Apple M"):
        found.ok("chip", name)
    else:
        found.fail("chip", f"{name} is not Apple silicon", "MLX needs a Mac with an M chip")
    return name


def check_power(found: Findings, said: CommandOutcome) -> None:
    """Check that this Mac does not sleep, and starts again after a power failure.

    Args:
        found: collects the findings: a FAIL if the Mac sleeps when idle, a WARN for disks that
            sleep, for low power mode, and if it stays off after a power failure.
        said: outcome of `pmset -g`.
    """
    settings = macos.read_power(said.text) if said.ok else {}
    if "sleep" not in settings:
        found.cannot_check(
            "sleep",
            f"`pmset -g` does not show whether this Mac sleeps: {said.why}",
            "run it by hand",
        )
        return
    if settings["sleep"]:
        found.fail(
            "sleep",
            f"this Mac sleeps after {settings['sleep']} minutes without a user, and all ranks "
            "stand still",
            "`sudo pmset -a sleep 0 disksleep 0`",
        )
    elif settings.get("disksleep"):
        found.warn(
            "sleep",
            f"disks sleep after {settings['disksleep']} minutes",
            "`sudo pmset -a disksleep 0`",
        )
    else:
        found.ok("sleep", "this Mac does not sleep")
    if settings.get("lowpowermode") or settings.get("powermode") == 1:
        found.warn("power mode", "low power mode is on", "`sudo pmset -a lowpowermode 0`")
    if settings.get("autorestart") == 0:
        found.warn(
            "restart", "this Mac stays off after a power cut", "`sudo pmset -a autorestart 1`"
        )


def check_wired_memory(
    found: Findings, vm_stat: CommandOutcome, total: int | None, running: list[str]
) -> None:
    """Check that little memory is wired while no role runs, as a killed rank may leave some.

    More than 4 GiB and more than 15 % of all memory is a WARN.

    Args:
        found: collects one finding.
        vm_stat: outcome of `vm_stat`.
        total: memory of this Mac in bytes; None: unknown.
        running: roles of Lockstep that run here.
    """
    wired = macos.read_wired(vm_stat.text) if vm_stat.ok else None
    if wired is None or not total:
        found.cannot_check(
            "wired memory", f"`vm_stat` does not show it: {vm_stat.why}", "run it by hand"
        )
    elif running:
        found.ok("wired memory", f"{wired / GIB:.1f} GiB, while {', '.join(running)} run here")
    elif wired > max(WIRED_BYTES, WIRED_PART * total):
        found.warn(
            "wired memory",
            f"{wired / GIB:.1f} GiB are wired although no rank of Lockstep runs here: by another "
            "program, or by one that was killed",
            "end other programs that use the GPU; if it stays wired, restart this Mac",
        )
    else:
        found.ok("wired memory", f"{wired / GIB:.1f} GiB of {total / GIB:.0f} GiB")


def check_gpu_limit(
    found: Findings,
    limit: CommandOutcome,
    total: int | None,
    weights_bytes: int | None,
    ranks_share: float = 1.0,
) -> None:
    """Compare the memory that the GPU may use with this host's weights.

    Args:
        found: collects one finding: a FAIL if the weights need more than the limit, a WARN if the
            limit leaves macOS less than 2 GiB.
        limit: outcome of `sysctl -n iogpu.wired_limit_mb`; 0 means the default share.
        total: memory of this Mac in bytes; None: unknown.
        weights_bytes: approximate weights of this host's ranks; None: the model is not here.
        ranks_share: part of that memory for all ranks of this host (`rank_worker.memory_share`).
    """
    megabytes = macos.read_number(limit.text) if limit.ok else None
    if megabytes is None or not total:
        found.cannot_check(
            "GPU memory", f"`sysctl iogpu.wired_limit_mb` does not show it: {limit.why}"
        )
        return
    allowed = megabytes * 2**20 or total * (2 / 3 if total < 36 * GIB else 3 / 4)
    text = f"the GPU may use {allowed / GIB:.0f} GiB of {total / GIB:.0f} GiB"
    highest = total - 8 * GIB
    if weights_bytes is not None and ranks_share * allowed < weights_bytes <= allowed:
        found.fail(
            "GPU memory",
            f"{text}, its ranks {ranks_share * allowed / GIB:.0f} GiB of that "
            f"(rank_worker.memory_share), and their weights take about "
            f"{weights_bytes / GIB:.1f} GiB",
            "raise rank_worker.memory_share, or use more hosts: `lockstep plan` says what fits",
        )
    elif weights_bytes is not None and weights_bytes > allowed:
        more = int(1.2 * weights_bytes)
        found.fail(
            "GPU memory",
            f"{text}, and the weights for this host take about {weights_bytes / GIB:.1f} GiB",
            f"`sudo sysctl iogpu.wired_limit_mb={more // 2**20}`, and look at `lockstep plan`"
            if more <= highest
            else "use more hosts or a smaller model: `lockstep plan` says what fits",
        )
    elif allowed > total - 2 * GIB:
        found.warn(
            "GPU memory",
            f"{text}, which leaves macOS too little: it has panicked at such limits",
            f"`sudo sysctl iogpu.wired_limit_mb={max(0, highest) // 2**20}`",
        )
    else:
        found.ok("GPU memory", text)


def check_free_memory(found: Findings, said: CommandOutcome) -> None:
    """Check that at least 20 % of memory is free; less is a WARN.

    Args:
        found: collects one finding.
        said: outcome of `memory_pressure -Q`.
    """
    part = macos.read_free_share(said.text) if said.ok else None
    if part is None:
        found.cannot_check("free memory", f"`memory_pressure -Q` does not show it: {said.why}")
    elif part < FREE_PART_MIN:
        found.warn(
            "free memory", f"only {part:.0%} of memory is free", "end programs that use much memory"
        )
    else:
        found.ok("free memory", f"{part:.0%} is free")
