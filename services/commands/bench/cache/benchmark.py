"""`lockstep bench cache`: what reused prefixes save, and what keeping them costs."""

import tempfile
from pathlib import Path

from services.commands.bench.cache import prefix_reuse, session_replay, spilling_cost
from services.commands.bench.cache.testbed import CachePlan, CacheTestbed
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import disk, machine, noise
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Report
from services.commands.bench.serving.overhead import start_client
from services.commands.bench.serving.peers import MLX_LM, start_mlx_lm

COLUMNS = [*prefix_reuse.COLUMNS, *session_replay.COLUMNS, *spilling_cost.COLUMNS]
PARTS = {part.NAME: part.measure for part in (prefix_reuse, session_replay, spilling_cost)}
_IN_MEMORY = ("tmpfs", "ramfs")


def measure(plan: CachePlan) -> Report:
    """Run the parts that the plan names.

    Raises:
        UnavailableError: a server does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-cache-", dir=plan.directory) as name:
        folder = Path(name)
        report = _report(plan, folder)
        client = start_client(plan.log_folder)
        peer = start_mlx_lm(plan.model, plan.log_folder)
        try:
            print_progress(f"waiting for {MLX_LM}")
            peer.wait()
            peer.child.pause()
            setup = CacheTestbed(plan, prompts, client, peer, folder)
            for part in plan.parts:
                PARTS[part](setup, report)
        finally:
            client.stop()
            peer.child.stop()
    noise.add_noise_note(report)
    return report


def _report(plan: CachePlan, folder: Path) -> Report:
    file_system = disk.file_system_type(folder)
    report = Report(
        benchmark="cache",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "ranks": plan.ranks,
            "prefixes": ", ".join(map(str, plan.prefixes)),
            "repeats": f"{plan.repeats}, a third of it above {prefix_reuse.LONG_TOKENS} tokens",
            "file_system": file_system or "not told",
            "page_cache": _page_cache(plan, folder),
            **plan.settings,
        },
    )
    if file_system in _IN_MEMORY:
        report.notes.append(
            f"The blocks were on {file_system}, which is memory: no SSD was measured. "
            "Name a folder on one with --directory."
        )
    return report


def _page_cache(plan: CachePlan, folder: Path) -> str:
    if plan.is_warm:
        return "kept: blocks and plain reads come from memory"
    if disk.drop_page_cache(folder):
        return "emptied before blocks are read"
    return "not emptied: this system has no call for it, so reads may come from memory"
