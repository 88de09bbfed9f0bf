"""Heads and embeddings divided by token ids, for mlx-lm's families, on ranks in one process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.model.forward import Forward
from services.rank_worker.model.loading.loader import open_model
from services.rank_worker.model.sharding import head_split
from services.rank_worker.model.sharding.head_split import HeadSplit, split_head
from shared.configuration.settings import ModelConfig
from shared.messages.rank_link import VocabularySplit
from tests.mlx import models
from tests.mlx.loading.model_checkpoints import (
    loading_ranks,
    model_config,
    model_weights,
    save_checkpoint,
)
from tests.mlx.sharding.in_process_world import InProcessWorld, unlinked_collectives
from tests.mlx.sharding.moe_models import MOE_FAMILIES, VOCAB, make_moe_model

METAL_ONLY = {"muse_spark"}
PROMPT = mx.array([[(37 * place + 5) % VOCAB for place in range(11)]])


def _tied_llama() -> nn.Module:
    model = models.MODEL_FACTORIES["llama"]()
    del model["lm_head"]
    model.args.tie_word_embeddings = True
    return model


def _divide(
    ranks: InProcessWorld, make: Callable[[], nn.Module]
) -> tuple[list[nn.Module], list[HeadSplit]]:
    """Return the model of each rank with its rows of head and embedding, and the divisions."""
    made, splits = [], []
    for world in ranks.worlds:
        model = make()
        split = split_head(model, "all", world)
        assert split is not None, "the head is not found"
        made.append(model)
        splits.append(split)
    assert len({one.division for one in splits}) == 1
    return made, splits


def _assert_parts_are_the_logits(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], size: int, *, sums: int = 1
) -> list[HeadSplit]:
    whole = make()(PROMPT)
    ranks = InProcessWorld(monkeypatch, size)
    made, splits = _divide(ranks, make)
    logits = ranks.run(made, PROMPT)
    assert len(ranks.sums) == sums, "one sum completes the embedding"
    for one, split in zip(logits, splits, strict=True):
        assert one.shape[-1] == split.vocabulary.stop - split.vocabulary.start
    joined = mx.concatenate(logits, axis=-1)
    assert joined.shape == whole.shape
    assert float(mx.abs(joined - whole).max()) < 1e-4
    return splits


@pytest.mark.parametrize("family", list(models.MODEL_FACTORIES))
def test_parts_of_every_kind_of_model_compute_its_logits(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Tied and separate heads, scaled and capped logits: the family's own code computes them."""

    def make() -> nn.Module:
        # Some weights, such as those of convolutions, are those that mlx-lm draws.
        mx.random.seed(3)
        return models.MODEL_FACTORIES[family]()

    splits = _assert_parts_are_the_logits(monkeypatch, make, 2)
    assert len(splits[0].paths) == 2


def test_parts_of_one_matrix_for_head_and_embedding_compute_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model without a head of its own has the same rows for both."""
    splits = _assert_parts_are_the_logits(monkeypatch, _tied_llama, 2)
    assert splits[0].paths == ["model.embed_tokens"]


@pytest.mark.proof
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("moe_family", sorted(set(MOE_FAMILIES) - METAL_ONLY))
def test_parts_of_all_families_with_experts_compute_their_logits(
    monkeypatch: pytest.MonkeyPatch, moe_family: str, ties: bool
) -> None:
    """Families that know `tie_word_embeddings` have one matrix for both."""
    splits = _assert_parts_are_the_logits(
        monkeypatch, lambda: make_moe_model(moe_family, tie_word_embeddings=ties), 4
    )
    assert splits[0].vocabulary.size == VOCAB


def test_quantized_head_and_embedding_are_divided_with_their_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quantized rows are cut with scales and biases, and give the same logits."""

    def make() -> nn.Module:
        model = make_moe_model("qwen3_moe", hidden_size=64)
        nn.quantize(
            model,
            group_size=32,
            bits=8,
            class_predicate=lambda path, _: path in ("lm_head", "model.embed_tokens"),
        )
        return model

    assert isinstance(make().lm_head, nn.QuantizedLinear)
    _assert_parts_are_the_logits(monkeypatch, make, 2)


def test_divided_head_computes_selected_positions_and_embeddings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward of a divided model still finds head and embedding, as EAGLE heads need."""
    made, _ = _divide(InProcessWorld(monkeypatch, 2), models.MODEL_FACTORIES["qwen3"])
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, **_: array)
    for model in made:
        forward = Forward(model)
        assert forward.can_select
        assert forward.can_embed
        assert forward.hidden_dim == 48


@pytest.mark.parametrize(
    ("wanted", "paths"),
    [
        ("off", None),
        ("auto", None),
        ("head", ["lm_head"]),
        ("all", ["lm_head", "model.embed_tokens"]),
    ],
)
def test_setting_decides_which_matrices_are_divided(
    wanted: VocabularySplit, paths: list[str] | None
) -> None:
    """A small head stays whole unless the setting names it."""
    found = split_head(models.MODEL_FACTORIES["llama"](), wanted, unlinked_collectives(0, 2))
    assert (found.paths if found is not None else None) == paths


def test_auto_divides_a_large_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a size on, "auto" divides the head, and not the embedding beside it."""
    monkeypatch.setattr(head_split, "HEAD_BYTES_MIN", 4 * VOCAB * 48)
    found = split_head(models.MODEL_FACTORIES["llama"](), "auto", unlinked_collectives(0, 2))
    assert found is not None
    assert found.paths == ["lm_head"]


def test_one_rank_and_a_head_of_unknown_form_stay_whole() -> None:
    """A model whose logits do not follow from its linear layer stays whole."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.model = models.MODEL_FACTORIES["llama"]()
            self.extra = nn.Linear(48, VOCAB, bias=False)

        @property
        def layers(self) -> list[nn.Module]:
            return list(self.model.layers)

        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            return self.model(tokens, cache=cache)  # type: ignore[no-any-return]

    assert split_head(models.MODEL_FACTORIES["llama"](), "all", unlinked_collectives(0, 1)) is None
    model = Odd()
    model.model = _tied_llama()
    found = split_head(model, "head", unlinked_collectives(0, 2))
    assert found is not None
    assert found.paths == ["model.model.embed_tokens"]
    assert model.extra.weight.shape == (VOCAB, 48), "the other matrix is whole again"


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama", 4), ("tied", 2)])
def test_each_rank_reads_only_its_rows_of_head_and_embedding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, size: int
) -> None:
    """A rank reads and holds its rows; together the ranks hold each row once."""
    # Loading builds forwards, with their sums, but runs none.
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, **_: array)
    model = _tied_llama() if family == "tied" else models.MODEL_FACTORIES[family]()
    weights = model_weights(model)
    save_checkpoint(tmp_path, weights, model_config(model))
    settings = ModelConfig(path=str(tmp_path))
    whole = [rank.load(settings) for rank in loading_ranks("tensor", size)]
    rows: dict[str, list[mx.array]] = {}
    for rank in loading_ranks("tensor", size):
        split = dataclasses.replace(rank.split, vocabulary="all")
        opened = open_model(settings, rank.find(settings), split, rank.world, lambda *_: None)
        assert not opened.weights.computed, "weights were read whole"
        assert opened.head is not None
        loaded = opened.read(lambda *_: None)
        held = sum(len(model_weights(loaded.model)[f"{one}.weight"]) for one in opened.head.paths)
        missing_bytes = (len(opened.head.paths) * VOCAB - held) * 48 * 4
        assert loaded.shard_bytes == whole[rank.rank].shard_bytes - missing_bytes
        assert loaded.bytes_read == whole[rank.rank].bytes_read - missing_bytes
        assert opened.head.description in loaded.share
        for path in opened.head.paths:
            own = model_weights(loaded.model)[f"{path}.weight"]
            rows.setdefault(path, []).append(own)
    assert len(rows) == (1 if family == "tied" else 2)
    for path, parts in rows.items():
        assert mx.array_equal(mx.concatenate(parts), weights[f"{path}.weight"]), path
