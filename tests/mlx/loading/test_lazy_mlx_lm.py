"""Import of mlx-lm in a rank, without the library of tokenizers."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import PROCESS_DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]

_RANK = """
import sys
from services.rank_worker.model import lazy_mlx_lm

lazy_mlx_lm.import_mlx_lm()
from services.rank_worker import worker
from services.rank_worker.model.loading import build, source
assert "mlx_lm" in sys.modules and "transformers" not in sys.modules
import mlx.core as mx
import mlx_lm.utils
model, config = mlx_lm.utils.load_model(source.Path("models/demo"))
assert model(mx.array([[1, 2, 3]])).shape[:2] == (1, 3)
assert "transformers" not in sys.modules
from transformers import AutoTokenizer
print(len(AutoTokenizer.from_pretrained("models/demo").encode("What is Lockstep?")) > 1)
"""

_OTHER_VERSION = """
import sys
from services.rank_worker.model import lazy_mlx_lm

lazy_mlx_lm.import_mlx_lm()
assert not {"mlx_lm", "mlx_lm.part", "transformers"} & set(sys.modules), sys.modules.keys()
import mlx_lm
print(mlx_lm.version)
"""


def _run(code: str, *paths: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))},
        capture_output=True,
        text=True,
        timeout=PROCESS_DEADLINE_S,
        check=False,
    )


def test_demo_model_runs_without_importing_transformers() -> None:
    """The demo model runs without transformers; a later import of its tokenizer still works."""
    done = _run(_RANK)

    assert done.stdout.strip() == "True", done.stderr


def test_mlx_lm_is_imported_with_real_transformers_when_placeholder_lacks_a_name(
    tmp_path: Path,
) -> None:
    """A version of mlx-lm that needs more than the placeholder is imported normally.

    No half-imported module is left.
    """
    for package, text in {
        "transformers": "THINGS = 7\n",
        "mlx_lm": "from . import part\nversion = part.transformers.THINGS + 1\n",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "mlx_lm" / "part.py").write_text("import transformers\n")

    done = _run(_OTHER_VERSION, tmp_path)

    assert done.stdout.splitlines()[-1:] == ["8"], done.stderr
    assert "mlx_lm_placeholder_failed" in done.stdout + done.stderr
