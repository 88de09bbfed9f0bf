"""Models of the benchmarks: every form of layers loads, and has the fast path."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from services.commands.bench.random_model import SPECIAL_TOKENS, make_random_model
from tests.mlx.execution.fast_path.attention_models import open_of


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-latent", "tiny-4bit"])
def test_preset_has_the_fast_path_and_never_ends_its_text(preset: str, tmp_path: Path) -> None:
    """Completions of benchmarks must have their full length."""
    folder = tmp_path / preset
    make_random_model(folder, preset)
    model, _ = load_model(folder)
    # Ids of the first hundreds are bytes, of which some are never written.
    logits = model(mx.arange(300, 364)[None])
    assert mx.isfinite(logits).all().item()
    chosen = logits.argmax(axis=-1)
    assert (chosen >= len(SPECIAL_TOKENS)).all().item()
    assert open_of(model).state == "fast path"
