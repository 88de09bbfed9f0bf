"""`lockstep bench cache`: what reused prefixes save, and what keeping them costs."""

import tempfile
from pathlib import Path

from services.commands.bench.cache import decode, prefixes, replay
from services.commands.bench.cache.setup import CachePlan, Setup
from services.commands.bench.load.workload import PromptMaker
from services.commands.bench.measuring import calm, disk, machine
from services.commands.bench.measuring.processes import progress
from services.commands.bench.measuring.report import Report
from services.commands.bench.serving.overhead import start_client
from services.commands.bench.serving.peers import MLX_LM, start_mlx_lm

COLUMNS = [*prefixes.COLUMNS, *replay.COLUMNS, *decode.COLUMNS]
PARTS = {part.NAME: part.measure for part in (prefixes, replay, decode)}
_IN_MEMORY = ("tmpfs", "ramfs")


def measure(plan: CachePlan) -> Report:
    """Run the parts that the plan names.

    Raises:
        UnavailableError: a server does not start or answer.
    """
    prompts = PromptMaker(plan.model)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-cache-", dir=plan.directory) as name:
        folder = Path(name)
        report = _report(plan, folder)
        client = start_client(plan.log_folder)
        peer = start_mlx_lm(plan.model, plan.log_folder)
        try:
            progress(f"waiting for {MLX_LM}")
            peer.wait()
            peer.child.pause()
            setup = Setup(plan, prompts, client, peer, folder)
            for part in plan.parts:
                PARTS[part](setup, report)
        finally:
            client.stop()
            peer.child.stop()
    calm.note(report)
    return report


def _report(plan: CachePlan, folder: Path) -> Report:
    file_system = disk.file_system(folder)
    report = Report(
        benchmark="cache",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "ranks": plan.ranks,
            "prefixes": ", ".join(map(str, plan.prefixes)),
            "repeats": f"{plan.repeats}, a third of it above {prefixes.LONG_TOKENS} tokens",
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
    if disk.leave_page_cache(folder):
        return "emptied before blocks are read"
    return "not emptied: this system has no call for it, so reads may come from memory"
