"""Checks of a model's folder before anything is loaded, and the fingerprint of a model."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.model import checkpoint_files
from shared.model.fingerprint import EDGE_BYTES, model_fingerprint
from shared.model.sharding.feasibility import check_sharding

CONFIG = {
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


def _write_weights(path: Path, payload: bytes) -> None:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + payload)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two weight files."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _write_weights(tmp_path / "model-00001-of-00002.safetensors", b"a" * 100)
    _write_weights(tmp_path / "model-00002-of-00002.safetensors", b"b" * 300_000)
    return tmp_path


def test_weight_files_are_listed_with_size_and_payload_offset(folder: Path) -> None:
    """Files come in the order of their names, with their size and the start of the payload."""
    files = checkpoint_files.weight_files(folder)

    assert [file.path.name[:11] for file in files] == ["model-00001", "model-00002"]
    assert all(file.size_bytes == file.path.stat().st_size for file in files)
    assert [file.size_bytes - file.payload_start for file in files] == [100, 300_000]


@pytest.mark.parametrize(
    ("damage", "expected_words"),
    [
        (lambda data: data[:-1], "is cut off: it has 300,0"),
        (lambda data: data[:50], "not a safetensors file, or its start is missing|damaged|cut off"),
        (lambda data: b"", "not a safetensors file, or its start is missing"),
        (lambda data: b"\xff" * len(data), "not a safetensors file, or its start is missing"),
        (lambda data: data.replace(b'"w"', b"'w'"), "its header is damaged"),
    ],
)
def test_damaged_weight_file_error_names_that_file(
    folder: Path, damage: Any, expected_words: str
) -> None:
    """A file that is cut off, empty or has a damaged header gives one sentence with its name."""
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=expected_words) as caught:
        checkpoint_files.weight_files(folder)

    assert path.name in str(caught.value)


def test_error_names_weight_file_that_only_the_index_lists(folder: Path) -> None:
    """A file that only the index lists is named; a folder without weight files is refused."""
    index = {"weight_map": {"x": "model-00003-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 1 of the weight files .* model-00003"):
        checkpoint_files.weight_files(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no weight files"):
        checkpoint_files.weight_files(folder)


@pytest.mark.parametrize(
    ("text", "expected_words"),
    [("{", "is not valid JSON"), ("[]", "model_type"), ('{"a": 1}', "model_type")],
)
def test_model_config_without_model_type_is_refused(
    folder: Path, text: str, expected_words: str
) -> None:
    """Invalid JSON and JSON without a model type give different errors."""
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=expected_words):
        checkpoint_files.read_config(folder)


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        (CONFIG, 0, 512),
        (CONFIG, 64, 64),
        (CONFIG, 9_999, 9_999),
        ({"text_config": {"max_position_embeddings": 128}}, 0, 128),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 8.0}}, 0, 64),
        ({"max_position_embeddings": 2**40}, 0, 2**31 - 1),
    ],
)
def test_context_length_is_setting_or_else_value_of_model_config(
    config: dict[str, Any], asked: int, expected: int
) -> None:
    """The setting wins; nested configs count; the factor of rope scaling is not applied."""
    assert checkpoint_files.context_tokens_max(config, asked) == expected


def test_error_names_setting_when_model_config_has_no_context_length() -> None:
    """A config without a context length needs `model.context_tokens_max`."""
    with pytest.raises(ConfigError, match=r"model\.context_tokens_max"):
        checkpoint_files.context_tokens_max({})


def test_tensor_split_is_possible_for_common_divisors_of_heads_and_width() -> None:
    """1, 2 and 4 ranks divide 8 heads, 4 KV heads and a width of 96."""
    for size in (1, 2, 4):
        check_sharding(CONFIG, "tensor", size)


@pytest.mark.parametrize(
    ("changes", "size", "expected_words"),
    [
        ({}, 3, "its num_attention_heads is 8: set world.size to 1, 2 or 4"),
        ({}, 8, "its num_key_value_heads is 4"),
        ({"intermediate_size": 98}, 4, "its intermediate_size is 98: set world.size to 1 or 2"),
        (
            {"quantization": {"group_size": 32, "bits": 4}},
            2,
            "its intermediate_size is 96, quantized in groups of 32: set world.size to 1",
        ),
        ({"text_config": {"num_attention_heads": 3}}, 2, "its num_attention_heads is 3"),
    ],
)
def test_impossible_tensor_split_error_names_dimension_and_possible_rank_counts(
    changes: dict[str, Any], size: int, expected_words: str
) -> None:
    """The error names the dimension that does not divide, and the possible world sizes."""
    with pytest.raises(ConfigError, match=expected_words):
        check_sharding({**CONFIG, **changes}, "tensor", size)


def test_tensor_split_of_mla_model_ignores_number_of_kv_heads() -> None:
    """With MLA every rank holds the whole KV cache, so the number of KV heads does not matter."""
    check_sharding({**CONFIG, "num_key_value_heads": 1, "kv_lora_rank": 64}, "tensor", 8)


def _fingerprint(folder: Path, **changes: Any) -> str:
    options = {"dtype": "checkpoint", "world_size": 2, "sharding": "tensor", **changes}
    return model_fingerprint(
        checkpoint_files.read_config(folder), checkpoint_files.weight_files(folder), **options
    )


def test_model_fingerprint_ignores_key_order_of_config(folder: Path) -> None:
    """Two configs with the same values in another order have the same fingerprint."""
    before = _fingerprint(folder)
    (folder / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=3))
    assert _fingerprint(folder) == before


def test_model_fingerprint_changes_with_config_dtype_ranks_and_weights(folder: Path) -> None:
    """The config, the dtype, the world and both ends of the weights change the fingerprint."""
    path = folder / "model-00002-of-00002.safetensors"
    fingerprints = [
        _fingerprint(folder),
        _fingerprint(folder, dtype="float32"),
        _fingerprint(folder, world_size=4),
        _fingerprint(folder, sharding="none"),
    ]
    _write_weights(path, b"b" * 299_999 + b"c")
    fingerprints.append(_fingerprint(folder))
    _write_weights(path, b"c" + b"b" * 299_999)
    fingerprints.append(_fingerprint(folder))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 7}))
    fingerprints.append(_fingerprint(folder))

    assert len(set(fingerprints)) == len(fingerprints)
    assert EDGE_BYTES < 100_000
