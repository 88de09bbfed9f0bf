"""Weights that a plan counts, from the headers of a checkpoint."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.commands.planning.model.checkpoint import Checkpoint, read_checkpoint
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile
from tests.unit.commands.planning import sparse_checkpoints

SMALL = {
    **sparse_checkpoints.DENSE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}


def test_plan_counts_exact_bytes_of_checkpoint_in_several_files(tmp_path: Path) -> None:
    """Llama 3.1 70B in several files has 70,553,706,496 parameters of 16 bits."""
    folder = sparse_checkpoints.write(
        tmp_path, sparse_checkpoints.DENSE, sparse_checkpoints.dense_shapes(), files=4
    )

    found = sparse_checkpoints.read(folder)

    assert found.bytes == 2 * 70_553_706_496
    assert len(found.layers) == 80


def test_plan_does_not_count_tensors_that_mlx_lm_ignores(tmp_path: Path) -> None:
    """Vision towers, draft layers, tied outputs and rotary tables take no memory."""
    shapes = sparse_checkpoints.dense_shapes(SMALL)
    plain = sparse_checkpoints.read(
        sparse_checkpoints.write(tmp_path / "plain", SMALL, shapes)
    ).bytes
    extra = {
        "vision_tower.encoder.layers.0.self_attn.k_proj.weight": ("F32", (64, 64)),
        "model.visual.blocks.0.attn.qkv.weight": ("F32", (64, 64)),
        "model.layers.2.eh_proj.weight": ("F32", (64, 128)),
        "mtp.layers.0.mlp.up_proj.weight": ("F32", (64, 128)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,)),
    }
    tied = {**SMALL, "tie_word_embeddings": True}

    with_extra = sparse_checkpoints.read(
        sparse_checkpoints.write(tmp_path / "extra", SMALL, shapes | extra)
    )
    without_output = sparse_checkpoints.read(
        sparse_checkpoints.write(tmp_path / "tied", tied, shapes)
    )

    assert with_extra.bytes == plain
    assert without_output.bytes == plain - 2 * 256 * 64


def test_plan_counts_cast_and_fp8_weights_at_their_size_in_memory(tmp_path: Path) -> None:
    """float32 doubles 16-bit numbers but not packed ones; FP8 with scales becomes 16 bits."""
    shapes: sparse_checkpoints.Shapes = {
        "model.layers.0.self_attn.k_proj.weight": ("U32", (32, 8)),
        "model.layers.0.self_attn.k_proj.scales": ("BF16", (32, 1)),
        "model.layers.1.mlp.up_proj.weight": ("F8_E4M3", (128, 64)),
        "model.layers.1.mlp.up_proj.weight_scale_inv": ("F32", (1, 1)),
    }
    folder = sparse_checkpoints.write(tmp_path, SMALL, shapes)

    assert sparse_checkpoints.read(folder).bytes == 32 * 8 * 4 + 32 * 2 + 128 * 64 * 2
    assert sparse_checkpoints.read(folder, "float32").bytes == 32 * 8 * 4 + 32 * 4 + 128 * 64 * 4
    assert sparse_checkpoints.read(folder, "float32").float_bytes == 4


def test_plan_refuses_checkpoint_without_known_layer_names(tmp_path: Path) -> None:
    """A checkpoint without layer names that Lockstep knows is a ConfigError."""
    folder = sparse_checkpoints.write(tmp_path, SMALL, {"some.weight": ("F32", (2, 2))})

    with pytest.raises(ConfigError, match="no layers whose names Lockstep knows"):
        sparse_checkpoints.read(folder)


_VALUES = st.one_of(
    st.none(), st.text(max_size=8), st.integers(), st.lists(st.integers(), max_size=3)
)
_ENTRIES = st.one_of(
    _VALUES,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["BF16", "F32", "U32"]), _VALUES),
            "shape": st.one_of(st.lists(st.integers(0, 2**40), max_size=3), _VALUES),
        }
    ),
)


@given(header=st.one_of(_VALUES, st.dictionaries(st.text(max_size=30), _ENTRIES, max_size=5)))
def test_reading_any_checkpoint_header_raises_nothing_but_config_error(header: Any) -> None:
    """Reading any header returns a checkpoint or raises ConfigError, and no other error."""
    text = json.dumps(header).encode()
    file = WeightFile(Path("model.safetensors"), 8 + len(text), text)
    config = {"model_type": "llama", "num_hidden_layers": 2}

    with contextlib.suppress(ConfigError):
        assert isinstance(read_checkpoint(config, [file]), Checkpoint)


def test_plan_refuses_truncated_weight_file_by_name(tmp_path: Path) -> None:
    """The error for a truncated weight file names the file."""
    folder = sparse_checkpoints.write(
        tmp_path, SMALL, sparse_checkpoints.dense_shapes(SMALL), files=2
    )
    last = max(folder.glob("*.safetensors"))
    start = struct.unpack("<Q", last.read_bytes()[:8])[0]
    with last.open("r+b") as stream:
        stream.truncate(8 + start + 10)

    with pytest.raises(ConfigError, match=f"{last.name} is cut off"):
        sparse_checkpoints.read(folder)
