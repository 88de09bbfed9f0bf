"""The benchmark of grammars: its command line, its schemas and its times of masks."""

import json
from pathlib import Path

import pytest

from services.commands.bench import random_model
from services.commands.bench.serving import mask_times
from tests.unit.commands.bench.bench_arguments import parse


def test_structured_command_without_flags_times_16_requests_beside_16() -> None:
    """The case that the project's aim is about."""
    plan = parse(["structured"])
    assert (plan.rows, plan.new_tokens, plan.ranks) == (16, 96, 1)


def test_schemas_of_two_requests_differ_so_that_none_is_compiled_for_another() -> None:
    """A compiled grammar is kept by its text."""
    assert len({json.dumps(mask_times.schema(number)) for number in range(16)}) == 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    preset = random_model.PRESETS["tiny"]._replace(vocab=6_000, fills_vocab=True)
    silent = random_model._write_tokenizer(folder, preset)
    (folder / "silent.json").write_text(json.dumps(silent))
    return folder


def test_tokenizer_that_fills_its_vocabulary_has_a_token_for_every_id(folder: Path) -> None:
    """Made-up merges follow the trained ones, and plain ASCII ones may be generated."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert sorted(model["vocab"].values()) == list(range(6_000))
    silent = json.loads((folder / "silent.json").read_text())
    assert len(silent) < 600
    assert max(silent) < 6_000


def test_masks_of_schemas_are_filled_for_all_steps_and_timed(folder: Path) -> None:
    """No grammar ends or fails, so each row has a mask in every step."""
    found = mask_times.measure(folder, rows=3, steps=300)
    assert found["tokens"] == 6_001
    assert 0.0 < found["fill_ms_p50"] <= found["fill_ms_p99"]
    assert 0.0 < found["compile_ms_p50"] <= found["compile_ms_most"]
    assert found["tokenizer_s"] > 0.0
