"""`lockstep bench peers`: the same load against Lockstep and other servers, in turn.

Peers use the same matrix library as our ranks, so that the servers are compared and not the
libraries.
"""

import contextlib
import functools
import itertools
import shutil
import sys
from pathlib import Path

import click

from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import measure_case
from services.commands.bench.measuring.processes import (
    MeasuredServer,
    free_port,
    print_progress,
    wait_until_ready,
)
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.stack import started_stack
from services.commands.bench.serving.overhead import STACK, OverheadPlan, check_answer
from services.rank_worker.device import blas
from shared.errors import UnavailableError

COLUMNS = ["tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"]
MLX_LM, VLLM_MLX = "mlx_lm.server", "vllm-mlx"
VLLM_MLX_OPTION = click.Option(
    ["--vllm-mlx"],
    type=click.Path(),
    metavar="PROGRAM",
    help="The program of vllm-mlx (default: found on PATH).",
)


class PeersPlan(OverheadPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench peers`, from its command line."""

    vllm_mlx: str | None = None
    """Path of vllm-mlx's program; None: the one on PATH, if any."""


class PeerServer(MeasuredServer):
    """A server other than Lockstep that serves the same model; its name is its contender's."""

    def __init__(self, name: str, command: list[str], model: Path, log_folder: Path) -> None:
        """Start the server on a free port, with the same matrix library as our ranks.

        Args:
            name: name of its contender.
            command: program and arguments, without the address.
            model: the model's folder.
            log_folder: folder for its log.
        """
        port = free_port()
        super().__init__(
            name,
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            log_folder / f"{name.removesuffix('.server')}.log",
            _environment(log_folder),
            port=port,
            model=str(model),
        )

    def wait(self) -> None:
        """Wait until the server answers a GET of its health or models endpoint with 200.

        Raises:
            UnavailableError: when it ends or is not ready after 900 s.
        """
        print_progress(f"waiting for {self.name}")
        path = "/health" if self.name == MLX_LM else "/v1/models"
        wait_until_ready(self, self.port, path, timeout_s=900.0)


def measure(plan: PeersPlan, report: Report) -> None:
    """Measure latencies and tokens/s of Lockstep and of other servers (peers), in turn.

    Every server runs every case of the plan. A case is one prompt length and one number of
    clients; all its prompts have that length.

    Args:
        plan: the parameters of the benchmark.
        report: gets the cases, and a note if vllm-mlx is not installed.

    Raises:
        UnavailableError: when a server does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    report.settings |= {**plan.describe(), "connections": "one per request"}
    with contextlib.ExitStack() as cleanup:
        client = cleanup.enter_context(LoadClient(plan.log_folder))
        stack = cleanup.enter_context(started_stack(plan, report))
        peers = _start_peers(plan, report, cleanup)

        def measure_all(length: int, clients: int, rounds: int) -> dict[str, dict[str, float]]:
            found = {}
            for server in (stack, *peers):
                # A paused peer takes no time from the measured server.
                for peer in peers:
                    (peer.resume if peer is server else peer.pause)()
                work = [
                    [prompts.text_prompt(length) for _ in range(rounds)] for _ in range(clients)
                ]
                name = STACK if server is stack else server.name
                try:
                    answer = client.complete(server, work, plan.new_tokens)
                    tokens = clients * rounds * plan.new_tokens
                    found[name] = check_answer(answer, tokens, length)
                except UnavailableError as error:
                    raise UnavailableError(f"{name}: {error}") from None
            return found

        for length, clients in itertools.product(plan.prompt_tokens, plan.clients):
            conditions = {"prompt_tokens": length, "clients": clients}
            warm_up = functools.partial(measure_all, length, clients, 1)
            run = functools.partial(measure_all, length, clients, plan.rounds_for(length))
            case = measure_case(plan, report, conditions, run, warm_up=warm_up)
            for peer in peers:
                case.add_ratios(STACK, peer.name, "tokens_per_s", "ttft_p50_ms", "ttft_p95_ms")


def _start_peers(
    plan: PeersPlan, report: Report, cleanup: contextlib.ExitStack
) -> list[PeerServer]:
    """Start the peers and wait for them; `cleanup` stops them."""
    peers = [cleanup.enter_context(start_mlx_lm(plan.model, plan.log_folder))]
    program = plan.vllm_mlx or shutil.which("vllm-mlx")
    if program is None:
        report.notes.append(f"{VLLM_MLX} is not installed, so it was not measured.")
    else:
        command = [program, "serve", str(plan.model)]
        command += ["--continuous-batching", "--disable-prefix-cache"]
        peer = PeerServer(VLLM_MLX, command, plan.model, plan.log_folder)
        peers.append(cleanup.enter_context(peer))
    for peer in peers:
        peer.wait()
    return peers


def start_mlx_lm(model: Path, log_folder: Path) -> PeerServer:
    """Start mlx_lm.server on a free port; the caller waits until it is ready.

    Args:
        model: the model's folder.
        log_folder: folder for the log `mlx_lm.log`.
    """
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(model)]
    return PeerServer(MLX_LM, [*command, "--log-level", "WARNING"], model, log_folder)


@functools.cache
def _environment(folder: Path) -> dict[str, str]:
    """Return variables that make a peer use our matrix library.

    Cached because the library may have to be written into the folder.
    """
    return {"HF_HUB_OFFLINE": "1", **blas.environment(folder)}
