"""Processes of ranks without a scheduler: environments, orders and answers."""

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from services.commands.bench.fake_ranks.rank_processes import RankProcesses, rank_environments
from shared.errors import UnavailableError

ECHO = """
import json, os, sys
print(json.dumps({"rank": os.environ["MLX_RANK"]}), flush=True)
for line in sys.stdin:
    print(json.dumps({"rank": os.environ["MLX_RANK"], **json.loads(line)}), flush=True)
"""


def test_environment_of_each_rank_process_names_its_rank_peers_and_gpu(tmp_path: Path) -> None:
    """A ring has a hostfile; with NCCL each rank sees one GPU and all have one coordinator."""
    ring = rank_environments(tmp_path, "ring", 3)
    rows = json.loads(Path(ring[2]["MLX_HOSTFILE"]).read_text())
    assert len({address for (address,) in rows}) == 3
    assert [one["MLX_RANK"] for one in ring] == ["0", "1", "2"]
    nccl = rank_environments(tmp_path, "nccl", 2, one_gpu_each=True)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in nccl] == ["0", "1"]
    assert len({(one["NCCL_HOST_IP"], one["NCCL_PORT"]) for one in nccl}) == 1
    assert {one["MLX_WORLD_SIZE"] for one in nccl} == {"2"}
    assert (
        rank_environments(tmp_path, "off", 1, one_gpu_each=True)[0]["CUDA_VISIBLE_DEVICES"] == "0"
    )


def test_every_rank_process_receives_each_command_and_answers_in_rank_order(tmp_path: Path) -> None:
    """Each rank has its own environment variables."""
    command = [sys.executable, "-c", ECHO]
    variables = rank_environments(tmp_path, "off", 2)

    with closing(RankProcesses("echoes", command, variables, tmp_path)) as world:
        assert world.descriptions == [{"rank": "0"}, {"rank": "1"}]
        assert world.request({"what": "x"}) == [{"rank": rank, "what": "x"} for rank in "01"]


def test_error_names_rank_process_that_fails_to_start(tmp_path: Path) -> None:
    """The processes of the other ranks are stopped."""
    program = "import os, sys; sys.exit('no such device' if os.environ['MLX_RANK'] == '1' else 0)"

    with pytest.raises(UnavailableError, match=r"rank [01] of echoes ended"):
        RankProcesses(
            "echoes",
            [sys.executable, "-c", program],
            rank_environments(tmp_path, "off", 2),
            tmp_path,
        )


def test_sentence_of_rank_that_refuses_is_the_error(tmp_path: Path) -> None:
    """It has no log behind it. The other rank, which waits for this one, is stopped."""
    program = """
import json, os, time
if os.environ["MLX_RANK"] == "1":
    time.sleep(60)
print(json.dumps({"refused": "The shard does not fit."}), flush=True)
"""
    with pytest.raises(UnavailableError, match=r"^rank 0: The shard does not fit\.$"):
        RankProcesses(
            "world",
            [sys.executable, "-c", program],
            rank_environments(tmp_path, "off", 2),
            tmp_path,
        )
