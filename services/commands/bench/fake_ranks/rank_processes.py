"""Child processes of ranks without a scheduler. Owns their start and orders, not their work.

Orders and answers are JSON lines; every rank gets the same orders. The processes begin with
`standalone_rank`.
"""

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.commands.bench.measuring.processes import MeasuredProcess, free_port
from services.rank_worker.device.cuda.variables import encode_without_graphs
from shared.errors import UnavailableError


class RankProcesses:
    """The child processes of one world of ranks that a benchmark runs without a scheduler.

    Each measurement is ordered by a JSON object that goes to all ranks, and all answer it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        log_folder: Path,
    ) -> None:
        """Start one process per environment and wait for the first line of each.

        Args:
            name: name of the world, for error messages and log files.
            command: program and arguments, the same for every rank.
            environments: each rank's variables, from the function `rank_environments`.
            log_folder: folder for the logs `<name>-<rank>.log`.

        Raises:
            UnavailableError: when a process ends before its first line, or says in it why it cannot
                do its work.
        """
        self._children: list[MeasuredProcess] = []
        with ExitStack() as started:
            for rank, variables in enumerate(environments):
                title = f"rank {rank} of {name}" if len(environments) > 1 else name
                log = log_folder / f"{name.replace(' ', '-')}-{rank}.log"
                child = MeasuredProcess(title, command, log, variables, piped=True)
                started.callback(child.stop, 5.0)
                self._children.append(child)
            self.descriptions: list[dict[str, Any]] = []
            """Per rank the JSON object of its first line."""
            for rank, child in enumerate(self._children):
                about = child.receive()
                if "refused" in about:
                    prefix = f"rank {rank}: " if len(self._children) > 1 else ""
                    raise UnavailableError(f"{prefix}{about['refused']}")
                self.descriptions.append(about)
            self._started = started.pop_all()

    def request(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send an order to all ranks, wait for all and return their answers in rank order.

        Args:
            order: arguments of one measurement, which each rank gets as a JSON line.

        Raises:
            UnavailableError: when a rank ends before it answers.
        """
        for child in self._children:
            child.send(order)
        return [child.receive() for child in self._children]

    def close(self) -> None:
        """Stop all processes."""
        self._started.close()


def rank_environments(
    log_folder: Path, backend: str, size: int, *, one_gpu_each: bool = False
) -> list[dict[str, str]]:
    """Return each rank's environment variables for MLX's collectives.

    Args:
        log_folder: folder in which the hostfile of a ring is written.
        backend: off, ring or nccl.
        size: number of ranks.
        one_gpu_each: let rank n see only GPU n, also in a world of one rank.
    """
    common = {"RANKS": str(size), "HF_HUB_OFFLINE": "1"}
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    if backend == "ring":
        hostfile = log_folder / f"hosts-{size}-{os.getpid()}.json"
        hostfile.write_text(json.dumps([[address] for address in addresses]))
        common["MLX_HOSTFILE"] = str(hostfile)
    if backend == "nccl":
        host, _, port = addresses[0].rpartition(":")
        common |= {"NCCL_HOST_IP": host, "NCCL_PORT": port, "MLX_WORLD_SIZE": str(size)}
        # These variables replace those of this process, so its own choice is left out.
        if "MLX_USE_CUDA_GRAPHS" not in os.environ:
            encode_without_graphs(common)
    found = [{**common, "MLX_RANK": str(rank)} for rank in range(size)]
    if one_gpu_each:
        for rank, one in enumerate(found):
            one["CUDA_VISIBLE_DEVICES"] = str(rank)
    return found


def default_backend() -> str:
    """Return "nccl" if the installed MLX is built for CUDA, else "ring"."""
    names = {str(one.metadata["Name"]).lower() for one in importlib.metadata.distributions()}
    return "nccl" if any(name.startswith("mlx-cuda") for name in names) else "ring"
