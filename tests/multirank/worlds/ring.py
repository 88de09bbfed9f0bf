"""Programs that are the ranks of a ring, without a scheduler, and print their results."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


def run_ring(
    program: str,
    arguments: Sequence[str],
    size: int,
    folder: Path,
    deadline_s: float,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run a program as all ranks of a ring; return the JSON objects that they print.

    Args:
        program: name of the module.
        arguments: of the program.
        size: number of ranks; one rank gets no ring.
        folder: for the hostfile and the logs.
        deadline_s: longest time in seconds.
        variables: further ones of all ranks.
    """
    hosts = folder / f"hosts-{size}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(size)]))
    with ExitStack() as stack:
        ranks = []
        for rank in range(size):
            ring = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if size > 1 else {}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", program, *arguments],
                    cwd=ROOT,
                    env={**os.environ, **ring, **(variables or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stack.enter_context((folder / f"log-{size}-{rank}").open("wb")),
                )
            )
        try:
            answers = [one.communicate(timeout=deadline_s)[0] for one in ranks]
        finally:
            for one in ranks:
                one.kill()
                one.wait()
    logs = [(folder / f"log-{size}-{rank}").read_text()[-2_000:] for rank in range(size)]
    assert [one.returncode for one in ranks] == [0] * size, logs
    return [json.loads(answer) for answer in answers]
