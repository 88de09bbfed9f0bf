"""`lockstep bench peers`: the same load against Lockstep and other servers, in turn.

Peers use the same matrix library as our ranks, so that the servers are compared and not the
libraries.
"""

import functools
import shutil
import sys
from pathlib import Path

import click

from services.commands.bench.load.load_processes import start_closed_loop_client
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import (
    MeasuredProcess,
    free_port,
    print_progress,
    wait_until_ready,
)
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import (
    STACK,
    OverheadPlan,
    check_answer,
    completions_order,
    rounds_for,
)
from services.rank_worker.device import blas
from shared.errors import UnavailableError

SUMMARY = "the whole stack against mlx_lm.server and, where installed, vllm-mlx"
COLUMNS = ["tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"]
MLX_LM, VLLM_MLX = "mlx_lm.server", "vllm-mlx"
VLLM_MLX_OPTION = click.Option(
    ["--vllm-mlx"],
    type=click.Path(),
    metavar="PROGRAM",
    help="The program of vllm-mlx (default: found on PATH).",
)


class PeerServer:
    """A running server other than Lockstep that serves the same model.

    `name` is its contender's name, `model` the name of the model in requests to it.
    """

    def __init__(self, name: str, child: MeasuredProcess, port: int, model: str) -> None:
        self.name = name
        self.child = child
        self.port = port
        self.model = model

    def wait(self) -> None:
        """Wait until the server answers a GET of its health or models endpoint with 200.

        Raises:
            UnavailableError: when it ends or is not ready after 900 s.
        """
        path = "/health" if self.name == MLX_LM else "/v1/models"
        wait_until_ready(self.child, self.port, path, timeout_s=900.0)


def measure(plan: OverheadPlan, vllm_mlx: str | None) -> Report:
    """Measure latencies and tokens/s of Lockstep and of other servers (peers), in turn.

    Every server runs every case of the plan. A case is one prompt length and one number of
    clients; all its prompts have that length.

    Args:
        plan: the parameters of the benchmark.
        vllm_mlx: path of vllm-mlx's program; None: the one on PATH, if any.

    Raises:
        UnavailableError: when a server does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    report = Report(
        benchmark="peers",
        machine=machine.describe(),
        settings={
            **plan.describe(),
            "connections": "one per request",
        },
    )
    client = start_closed_loop_client(plan.log_folder)
    peers: list[PeerServer] = []
    try:
        with Stack(
            plan.model, plan.ranks, plan.log_folder / "lockstep.log", plan.settings
        ) as stack:
            report.machine |= stack.describe()
            _start_peers(plan, vllm_mlx, report, peers)
            for length in plan.prompt_tokens:
                for concurrency in plan.concurrencies:
                    print_progress(f"{length} prompt tokens, {concurrency} clients")
                    report.cases.append(
                        _measure_case(
                            plan,
                            length,
                            concurrency,
                            prompts=prompts,
                            client=client,
                            stack=stack,
                            peers=peers,
                        )
                    )
    finally:
        client.stop()
        for peer in peers:
            peer.child.stop()
    noise.add_noise_note(report)
    return report


def _start_peers(
    plan: OverheadPlan, vllm_mlx: str | None, report: Report, peers: list[PeerServer]
) -> None:
    """Start the peers and wait for them; append each to `peers` at once, so that it is stopped."""
    peers.append(start_mlx_lm(plan.model, plan.log_folder))
    program = vllm_mlx or shutil.which("vllm-mlx")
    if program is None:
        report.notes.append(f"{VLLM_MLX} is not installed, so it was not measured.")
    else:
        peers.append(_start_vllm_mlx(plan, program))
    for peer in peers:
        print_progress(f"waiting for {peer.name}")
        peer.wait()


def start_mlx_lm(model: Path, log_folder: Path) -> PeerServer:
    """Start mlx_lm.server on a free port; the caller waits until it is ready.

    Args:
        model: the model's folder.
        log_folder: folder for the log `mlx_lm.log`.
    """
    port = free_port()
    command = [
        *[sys.executable, "-m", "mlx_lm.server"],
        *["--model", str(model), "--host", "127.0.0.1", "--port", str(port)],
        *["--log-level", "WARNING"],
    ]
    child = MeasuredProcess(MLX_LM, command, log_folder / "mlx_lm.log", _environment(log_folder))
    return PeerServer(MLX_LM, child, port, str(model))


def _start_vllm_mlx(plan: OverheadPlan, program: str) -> PeerServer:
    port = free_port()
    command = [
        *[program, "serve", str(plan.model), "--host", "127.0.0.1", "--port", str(port)],
        *["--continuous-batching", "--disable-prefix-cache"],
    ]
    log = plan.log_folder / "vllm-mlx.log"
    child = MeasuredProcess(VLLM_MLX, command, log, _environment(plan.log_folder))
    return PeerServer(VLLM_MLX, child, port, str(plan.model))


@functools.cache
def _environment(folder: Path) -> dict[str, str]:
    """Return variables that make a peer use our matrix library.

    Cached because the library may have to be written into the folder.
    """
    return {"HF_HUB_OFFLINE": "1", **blas.environment(folder)}


def _measure_case(
    plan: OverheadPlan,
    length: int,
    concurrency: int,
    *,
    prompts: PromptGenerator,
    client: MeasuredProcess,
    stack: Stack,
    peers: list[PeerServer],
) -> Case:
    case = Case(conditions={"prompt_tokens": length, "clients": concurrency})
    rounds = rounds_for(plan, length)
    servers = [(STACK, stack.port, stack.name)]
    servers += [(peer.name, peer.port, peer.model) for peer in peers]
    for repeat in range(-1, plan.repeats):
        count = rounds if repeat >= 0 else 1

        def measure_all(count: int = count) -> dict[str, dict[str, float]]:
            found = {}
            for name, port, model in servers:
                # A paused peer takes no time from the measured server.
                for peer in peers:
                    (peer.child.resume if peer.name == name else peer.child.pause)()
                work = [
                    [prompts.text_prompt(length) for _ in range(count)] for _ in range(concurrency)
                ]
                order = completions_order(port, model, work, plan.new_tokens)
                answer = client.request(order)
                try:
                    found[name] = check_answer(
                        answer, concurrency * count * plan.new_tokens, length
                    )
                except UnavailableError as error:
                    raise UnavailableError(f"{name}: {error}") from None
            return found

        if repeat < 0:
            # Warm-up.
            measure_all()
            continue
        found, foreign = noise.measure_with_retries(measure_all, plan.tries)
        for name, metrics in found.items():
            case.series_of(name).add(metrics | {noise.FOREIGN_CORES: foreign})
    for peer in peers:
        for metric in ("tokens_per_s", "ttft_p50_ms", "ttft_p95_ms"):
            case.add_ratio(metric, STACK, peer.name)
    return case
