"""Models of the benchmarks: every form of layers loads, and has the fast path."""

import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from services.commands.bench import random_model
from services.commands.bench.random_model import (
    PRESETS,
    SPECIAL_TOKENS,
    Quantization,
    make_random_model,
)
from tests.mlx.execution.fast_path.attention_models import open_of


def _check(folder: Path) -> None:
    """Load a model, draw from it and open its fast path."""
    model, _ = load_model(folder)
    # Ids of the first hundreds are bytes, of which some are never written.
    logits = model(mx.arange(300, 364)[None])
    assert mx.isfinite(logits).all().item()
    chosen = logits.argmax(axis=-1)
    assert (chosen >= len(SPECIAL_TOKENS)).all().item()
    assert open_of(model).state == "fast path"


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-latent", "tiny-4bit"])
def test_preset_has_the_fast_path_and_never_ends_its_text(preset: str, tmp_path: Path) -> None:
    """Completions of benchmarks must have their full length."""
    make_random_model(tmp_path / preset, preset)
    _check(tmp_path / preset)


@pytest.mark.parametrize(
    "quantization", [PRESETS[name].quantization for name in ("4b-4bit", "4b-8bit", "4b-mxfp4")]
)
def test_quantized_preset_has_the_fast_path_and_smaller_layers(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modes are those of the presets, in layers that a test can compute."""
    small = PRESETS["tiny"]._replace(layers=2, quantization=quantization)
    monkeypatch.setitem(random_model.PRESETS, "small", small)
    make_random_model(tmp_path / "small", "small")
    _check(tmp_path / "small")
    layer = (tmp_path / "small" / "model-00002-of-00003.safetensors").stat().st_size
    numbers = sum(math.prod(shape) for shape in random_model._layer_shapes(small, 0).values())
    assert quantization.bits / 8 < layer / numbers < quantization.bits / 8 + 0.2
