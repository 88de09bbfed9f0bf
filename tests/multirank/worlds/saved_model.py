"""Tiny models in files, for worlds of real ranks."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def save_model(folder: Path, family: str, **sizes: int) -> None:
    """Save a tiny model in another process, because this one may not import MLX.

    Args:
        folder: of the model; made here.
        family: name of mlx-lm's module.
        sizes: fields of its config.
    """
    folder.mkdir()
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "import mlx.core as mx\n"
        "from mlx.utils import tree_flatten\n"
        "from tests.mlx.sharding.moe_models import make_moe_model, moe_config\n"
        "mx.set_default_device(mx.cpu)\n"
        "folder, family, sizes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])\n"
        "config = moe_config(family, **sizes)\n"
        "(folder / 'config.json').write_text(json.dumps(config))\n"
        "weights = dict(tree_flatten(make_moe_model(family, **sizes).parameters()))\n"
        "mx.save_safetensors(str(folder / 'model.safetensors'), weights, {'format': 'mlx'})\n"
    )
    command = [sys.executable, "-c", code, str(folder), family, json.dumps(sizes)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
