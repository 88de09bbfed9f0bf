"""CPU cores of the ranks of one host, on Linux. No MLX.

The threads of MLX and of its ring backend wait in busy loops, so ranks that share cores slow each
other down (2 ranks on 2 cores, 16 sequences: 436 tokens/s with a core each, 85 to 266 without).
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from shared.log import Log
from shared.messages import JoinWorld

_log = Log("rank_worker.cores")


def place_on_host(hostfile_text: str, rank: int) -> tuple[int, int]:
    """Return (number of ranks before this one on its host, number of ranks on its host).

    Args:
        hostfile_text: content of `MLX_HOSTFILE`, a JSON list of addresses by rank; "": the rank is
            alone on its host.
        rank: this rank.
    """
    if not hostfile_text:
        return 0, 1
    hosts = [addresses[0].rpartition(":")[0] for addresses in json.loads(hostfile_text)]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def hostfile(order: JoinWorld, environment: Mapping[str, str] = os.environ) -> str:
    """Return the content of the ring's hostfile; "" without one.

    It comes from the order to join or, for launched ranks, from the file that `MLX_HOSTFILE` names.
    """
    text = order.files.get("MLX_HOSTFILE", "")
    if not text and (path := environment.get("MLX_HOSTFILE")):
        text = Path(path).read_text()
    return text.strip()


def share(cores: Sequence[int], place: int, count: int) -> list[int]:
    """Return the CPU cores of one rank: equally many adjacent ones, or one shared core.

    A core is shared when the host has more ranks than cores.

    Args:
        cores: numbers of all cores that the host's ranks may use, ascending.
        place: number of ranks before this one on the host.
        count: number of ranks on the host.
    """
    if count > len(cores):
        return [cores[place % len(cores)]]
    size = len(cores) // count
    return list(cores[place * size : (place + 1) * size])


def pin(choice: Literal["auto", "on", "off"], *, on_cpu: bool, place: int, count: int) -> list[int]:
    """Bind this thread, and threads that it starts later, to the rank's cores.

    Args:
        choice: the setting; "auto" pins when several CPU ranks share a host.
        on_cpu: the model runs on the CPU.
        place: number of ranks before this one on the host.
        count: number of ranks on the host.

    Returns:
        The cores; [] when the thread is not bound.
    """
    wanted = choice == "on" or (choice == "auto" and on_cpu and count > 1)
    if not wanted or sys.platform != "linux":
        return []
    cores = share(sorted(os.sched_getaffinity(0)), place, count)
    os.sched_setaffinity(0, cores)
    _log.info("cores_pinned", cores=",".join(map(str, cores)))
    return cores
