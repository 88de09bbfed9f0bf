"""Checks of a Linux host: GPUs, cores, BLAS, memory."""

import importlib.metadata

from services.commands.doctor.facts import Findings
from services.commands.doctor.reading import linux
from services.commands.doctor.system_commands import CommandOutcome
from shared.os.memory import usable_memory

GIB = 2**30
_ONLY_MACS = {
    "rdma": "RDMA over Thunderbolt",
    "thunderbolt": "Thunderbolt ports and cables",
    "wired memory": "memory wired for the GPU",
    "sleep": "energy settings",
}


def report_mac_only_checks(found: Findings) -> None:
    """Add a CANNOT CHECK finding for each check that only a Mac can make, such as RDMA."""
    for check, what in _ONLY_MACS.items():
        found.cannot_check(check, f"{what}: only on macOS")


def check_gpus(found: Findings, said: CommandOutcome, *, needed: bool) -> bool:
    """Check that there is a GPU if one is needed, and that its memory is not in use.

    Args:
        found: collects the findings: a FAIL if no GPU is there although needed, a WARN for each
            GPU of whose memory more than 10 % is in use.
        said: outcome of `linux.GPU_QUERY`, which runs `nvidia-smi`.
        needed: whether nccl is configured.

    Returns:
        Whether there is any GPU.
    """
    cards = linux.read_gpus(said.text) if said.ok else []
    if cards:
        names = ", ".join(dict.fromkeys(f"{card.name}, driver {card.driver}" for card in cards))
        found.ok("GPU", f"{len(cards)} x {names}")
        for number, card in enumerate(cards):
            if card.total and card.used > 0.1 * card.total:
                found.warn(
                    f"GPU {number} memory",
                    f"{card.used / GIB:.1f} GiB of {card.total / GIB:.0f} GiB are in use",
                    "find the process with `nvidia-smi`, unless it is Lockstep itself",
                )
    elif needed:
        found.fail(
            "GPU",
            f"nccl is configured, but there is no GPU: {said.why}",
            'install NVIDIA\'s driver, or set world.backend = "ring"',
        )
    else:
        found.ok("GPU", "no GPU; ranks compute on the CPU")
    return bool(cards)


def check_cores(found: Findings, cores: int, ranks: int) -> None:
    """Check that this host has at least two cores per rank; fewer are a WARN.

    Args:
        found: collects one finding.
        cores: number of cores that processes may use here.
        ranks: number of ranks on this host.
    """
    if ranks and cores < 2 * ranks:
        found.warn(
            "cores",
            f"{cores} cores for {ranks} ranks: collectives wait for a core",
            "use fewer ranks per host, or a host with at least two cores per rank",
        )
    else:
        found.ok("cores", f"{cores}")


def check_blas(found: Findings, setting: str) -> None:
    """Check that OpenBLAS is installed and not switched off; each is a WARN.

    Args:
        found: collects one finding.
        setting: value of `rank_worker.blas`.
    """
    try:
        version = importlib.metadata.version("scipy-openblas32")
    except importlib.metadata.PackageNotFoundError:
        found.warn(
            "BLAS",
            "OpenBLAS is not installed, so the CPU backend is about 5 times slower",
            "`pip install scipy-openblas32`",
        )
        return
    if setting == "off":
        found.warn("BLAS", "rank_worker.blas is off", 'set rank_worker.blas = "auto"')
    else:
        found.ok("BLAS", f"OpenBLAS {version}")


def check_memory(
    found: Findings, weights_bytes: int | None, ranks: int = 1, machine_share: float = 0.0
) -> None:
    """Compare the weights for this host with its available memory.

    Args:
        found: collects one finding: a FAIL if the weights need more than is available, a WARN if
            less than a tenth of all memory is available.
        weights_bytes: approximate weights of this host's ranks; None: not in this memory (they
            are on a GPU, no rank runs here, or the model is not here).
        ranks: number of ranks of this host.
        machine_share: `rank_worker.memory_share`, the part of each rank; 0: equal parts of all.
    """
    memory = usable_memory()
    allowed = memory.free_bytes
    if machine_share and ranks:
        allowed = min(allowed, ranks * usable_memory(ranks, machine_share).free_bytes)
    free, total = f"{memory.free_bytes / GIB:.1f} GiB", f"{memory.total_bytes / GIB:.1f} GiB"
    if memory.limited_by:
        total += f", the limit of the control group {memory.limited_by}"
    if weights_bytes is not None and weights_bytes > allowed:
        shared, remedy = "", "end other programs or use more hosts"
        if allowed < memory.free_bytes:
            shared = f", {allowed / GIB:.1f} GiB of it for its ranks (rank_worker.memory_share)"
            remedy = "raise rank_worker.memory_share, end other programs or use more hosts"
        found.fail(
            "free memory",
            f"{free} of {total} are free{shared}, and the weights for this host take about "
            f"{weights_bytes / GIB:.1f} GiB",
            f"{remedy}: `lockstep plan` says what fits",
        )
    elif memory.free_bytes < 0.1 * memory.total_bytes:
        found.warn(
            "free memory",
            f"only {free} of {total} are free",
            "end programs that use much memory",
        )
    else:
        found.ok("free memory", f"{free} of {total}")
