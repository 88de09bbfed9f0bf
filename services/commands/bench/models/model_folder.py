"""Where the model is that a benchmark runs: a folder of the user's, or one with random weights."""

import sys
from pathlib import Path

from services.commands.bench import random_model
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from shared.errors import UsageError
from shared.model.location import local_folder


def find_or_make(model: str | None, preset: str, logs: Path) -> Path:
    """Return the model's folder; make it when it is a preset that is not there yet.

    Args:
        model: what the user named, or None.
        preset: used where nothing is named.
        logs: folder for what its maker says.

    Raises:
        UsageError: there is no such folder.
        UnavailableError: it could not be made.
    """
    if model:
        folder = local_folder(model)
        if folder is None:
            raise UsageError(f"{model} is no folder: benchmarks need the files here.")
        return folder.resolve()
    folder = random_model.preset_folder(preset)
    if not folder.is_dir():
        print_progress(f"making a model with random weights in {folder}")
        # In a process of its own: MLX must not take this one's memory on the device.
        command = [sys.executable, "-m", "services.commands.bench.random_model", str(folder)]
        maker = MeasuredProcess("the model maker", [*command, preset], logs / "model.log")
        if maker.process.wait() != 0:
            raise maker.failure("failed")
        maker.stop()
    return folder
