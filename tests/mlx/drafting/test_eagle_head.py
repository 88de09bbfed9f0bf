"""EAGLE heads: inputs as in the published method, memory, and files that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.kv_cache.rows.row_store import RowStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.speculation.eagle import PENDING_STATES_MAX, ROW_PADDING_TOKENS
from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.load import open_drafter
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.configuration.settings import Config, ModelConfig, SpeculationConfig
from shared.errors import ConfigError
from shared.model.location import demo_folder
from tests.mlx.drafting.drafter_driver import DrafterDriver, random_eagle_head
from tests.mlx.executor_driver import (
    admission,
    generate_alone,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import PLAIN_FAMILIES, MakeModel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2_048,
    "rope_theta": 10_000.0,
    "vocab_size": 2_048,
    "bias": False,
}
"""Config of a published head, with sizes for the demo model."""


def _expected(model: nn.Module, draft: LoadedDrafter, known: list[int], count: int) -> list[int]:
    """Return greedy drafts after known tokens, computed without rows or caches."""
    forward, head = Forward(model), draft.model
    assert isinstance(head, EagleHead)
    forward.keeps_hidden = True
    model(mx.array(known[:-1])[None])
    hidden = forward.hidden
    assert hidden is not None
    tokens, drafts = known[1:], []
    for _ in range(count):
        outputs = head(forward.embed(mx.array(tokens)[None]), hidden, [None] * len(head.layers))
        draft_id = int(np.argmax(np.array(forward.head(outputs[:, -1:])[0, -1])))
        drafts.append(draft_id)
        tokens = [*tokens, draft_id]
        hidden = mx.concatenate([hidden, outputs[:, -1:]], axis=1)
    return drafts


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_eagle_drafts_of_many_steps_equal_drafts_recomputed_over_whole_sequence(
    make_model: MakeModel, family: str, layers: int
) -> None:
    """Drafts equal those of the head over all hidden states of the sequence at once.

    The rows are ragged, one is moved, some steps have no drafts, and prompts share forwards.
    """
    model, draft = make_model(family), random_eagle_head(layers=layers, bias=True)
    driver = DrafterDriver(model, draft, 5)
    lengths = {1: 3, 2: 9, 3: 17, 4: 10}
    driver.step(
        admitted=[admission(one, one, make_prompt(50 + one, lengths[one])) for one in lengths],
        prefill_chunks=[prefill_chunk(one, 0, count, count) for one, count in lengths.items()],
    )
    plans: list[dict[int, int] | None] = [
        {1: 4, 2: 1, 3: 6, 4: 2},
        {2: 5, 4: 3},
        {},
        {1: 2, 2: 2, 3: -1, 4: 7},
        {1: -1, 2: 2, 3: -1, 4: -1},
        None,
        None,
        {1: 2, 2: 2, 3: 3, 4: 1},
    ]
    moves: dict[str, Any] = {"moves": [(4, 0)]}
    order = [4, 1, 2, 3]
    checked = 0
    for counts in plans:
        known = {one: driver.all_tokens(one) for one in order}
        launched = driver.launch(decodes=order, counts=counts, **moves)
        driver.finish(launched)
        moves = {}
        assert launched.sample is not None
        proposed = launched.sample.drafts
        ids = proposed.read_ids()
        for one in order:
            got = [ids[place] for place in proposed.index_range(one, proposed.count(one))]
            count = (counts or {}).get(one, 0)
            assert got == _expected(model, draft, known[one], max(0, count))
            checked += len(got)

    assert checked == 13 + 8 + 11 + 2 + 8


def test_eagle_row_keeps_bounded_hidden_states_after_steps_without_drafts(
    make_model: MakeModel,
) -> None:
    """After many steps without drafts the head keeps a bounded number of states; tokens are
    unchanged.
    """
    model = make_model("llama")
    driver = DrafterDriver(model, random_eagle_head(), 2, 256)
    for one in (1, 2):
        driver.start(one, one - 1, make_prompt(one, 9))
    for step in range(PENDING_STATES_MAX + 20):
        driver.step(decodes=[1] if step < 15 else [1, 2])
    eagle_rows = driver.executor.proposer._store  # type: ignore[attr-defined]
    driver.step(decodes=[1, 2], counts={1: 4, 2: 3})
    # All tokens of the prompt but the last, and the states that were kept.
    assert [eagle_rows.length(slot) for slot in (0, 1)] == [8 + PENDING_STATES_MAX] * 2
    driver.step(decodes=[1, 2], counts={1: 2, 2: 2})

    for one in (1, 2):
        got = driver.tokens[one]
        assert got == generate_alone(model, make_prompt(one, 9), len(got))


def _save(folder: Path, weights: dict[str, mx.array], **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _weights(**changes: mx.array | None) -> dict[str, mx.array]:
    """Return published names with shapes for the demo model; None removes a name."""
    shapes = {
        "embed_tokens.weight": (2_048, 192),
        "fc.weight": (192, 384),
        "layers.0.self_attn.q_proj.weight": (192, 192),
        "layers.0.self_attn.k_proj.weight": (96, 192),
        "layers.0.self_attn.v_proj.weight": (96, 192),
        "layers.0.self_attn.o_proj.weight": (192, 192),
        "layers.0.mlp.gate_proj.weight": (384, 192),
        "layers.0.mlp.up_proj.weight": (384, 192),
        "layers.0.mlp.down_proj.weight": (192, 384),
        "layers.0.post_attention_layernorm.weight": (192,),
    }
    mx.random.seed(1)
    made = {name: mx.random.normal(shape).astype(mx.float16) for name, shape in shapes.items()}
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return {name: one for name, one in {**made, **named}.items() if one is not None}


def _load(folder: Path, dtype: mx.Dtype = mx.float16) -> LoadedDrafter:
    speculation = SpeculationConfig(method="eagle", draft_model=str(folder))
    config = Config(model=ModelConfig(path="demo"), speculation=speculation)
    opened = open_drafter(config, 8_192, dtype, lambda _: None)
    assert opened is not None
    return opened.read()


@pytest.mark.parametrize("biased", [False, True])
def test_eagle_head_with_published_weight_names_is_loaded(tmp_path: Path, *, biased: bool) -> None:
    """A head loads by its published weight names; its embeddings are ignored and its biases
    used.
    """
    more: dict[str, mx.array | None] = {}
    if biased:
        more = {"fc__bias": mx.ones((192,)), "layers__0__self_attn__q_proj__bias": mx.ones((192,))}
    weights = _weights(**more)
    draft = _load(_save(tmp_path / "head", weights))
    read: dict[str, Any] = dict(tree_flatten(dict(draft.model.parameters())))

    del weights["embed_tokens.weight"]
    assert read.keys() == weights.keys()
    assert all(mx.array_equal(read[name], value).item() for name, value in weights.items())
    assert len(draft.fingerprint) == 32


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_eagle_memory_predicted_from_headers_equals_memory_of_loaded_head(
    tmp_path: Path, dtype: mx.Dtype
) -> None:
    """The memory needs computed from the headers equal those of the loaded head."""
    weights = _weights()
    folder = _save(tmp_path / "head", weights)
    speculation = SpeculationConfig(method="eagle", draft_model=str(folder))
    config = Config(model=ModelConfig(path="demo"), speculation=speculation)
    opened = open_drafter(config, 8_192, dtype, lambda _: None)
    assert opened is not None
    del weights["embed_tokens.weight"]
    assert opened.needs.weight_bytes == dtype.size * sum(one.size for one in weights.values())
    head: Any = opened.read().model
    read: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    assert {one.dtype for one in read.values()} == {dtype}
    rows = RowStore(head.layer_parts())
    assert opened.needs.kv_bytes_per_token == rows.bytes_per_token == 2 * 2 * 48 * dtype.size
    assert opened.needs.kv_bytes_per_row == ROW_PADDING_TOKENS * rows.bytes_per_token


def test_eagle_draft_rows_take_reported_bytes_including_padding(make_model: MakeModel) -> None:
    """The arrays of draft rows take the reported bytes per token and per row."""
    model = make_model("llama")
    executor = make_executor(model, drafter=random_eagle_head())
    per_row = executor.kv_bytes_per_row
    assert per_row == ROW_PADDING_TOKENS * executor.proposer.bytes_per_token
    proposer: Any = executor.proposer
    for rows, tokens in ((1, 16), (3, 64)):
        proposer.resize(rows, tokens)
        taken = sum(array.nbytes for layer in proposer._store._layers for array in layer.arrays)
        assert taken == rows * (tokens * executor.proposer.bytes_per_token + per_row)
    assert make_executor(model).kv_bytes_per_row == 0


INVALID_HEADS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another width": (
        {"hidden_size": 256},
        {},
        r"fc.weight is \[192, 384\], expected \[256, 512\]",
    ),
    "another vocabulary": ({"vocab_size": 32_000}, {}, "trained for a vocabulary of 32000 tokens"),
    "no head": ({}, {"fc__weight": None}, "no fc.weight"),
    "a layer less": ({"num_hidden_layers": 2}, {}, "layers.1.* is missing"),
    "no layer": ({"num_hidden_layers": 0}, {}, "does not describe an EAGLE head"),
    "other heads": ({"num_key_value_heads": 4}, {}, "k_proj.weight is"),
    "of another kind": ({}, {"d2t": mx.zeros((4,))}, "d2t is .* expected no such weight"),
    "no shape": ({"intermediate_size": None}, {}, "does not describe an EAGLE head"),
}


@pytest.mark.parametrize(
    ("config", "weights", "message"), INVALID_HEADS.values(), ids=INVALID_HEADS
)
def test_eagle_head_with_config_or_weights_contradicting_model_is_refused(
    tmp_path: Path, config: dict[str, Any], weights: dict[str, Any], message: str
) -> None:
    """A head whose files do not fit the model is refused with the mismatch."""
    folder = _save(tmp_path / "head", _weights(**weights), **config)

    with pytest.raises(ConfigError, match=message):
        _load(folder)


def test_eagle_head_for_other_hidden_state_width_is_refused(make_model: MakeModel) -> None:
    """A head for hidden states of another width is refused."""
    with pytest.raises(ConfigError, match="hidden states of 32 numbers, but this model's have 48"):
        DrafterDriver(make_model("qwen3"), random_eagle_head(32))


def test_eagle_head_in_pytorch_format_is_refused_with_remedy(tmp_path: Path) -> None:
    """A head with weights in the format of PyTorch is refused with the remedy."""
    folder = _save(tmp_path / "head", _weights())
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"convert them to model\.safetensors"):
        _load(folder)
    assert (demo_folder() / "config.json").is_file()
