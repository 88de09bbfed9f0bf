"""Draft tokens that real ranks propose with a draft model or an EAGLE head."""

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from shared.messages import (
    DraftChunk,
    JoinWorld,
    Message,
    RankReady,
    RolledBack,
    Sampling,
)
from tests.multirank.worlds.planned_world import PlannedWorld
from tests.multirank.worlds.scripted_scheduler import ScriptedScheduler

SAMPLING = {
    1: Sampling(seed=1, temperature=0.0),
    2: Sampling(seed=2, temperature=0.8, top_p=0.95),
    3: Sampling(seed=3, temperature=0.7, presence_penalty=0.3),
}
PROMPTS = {one: list(range(40 * one, 43 * one + 5)) for one in SAMPLING}
STEPS = 5
COUNTS = [{1: 4, 2: 1, 3: 0}, {1: 2, 2: 5, 3: 3}, {1: 0, 2: 0, 3: 0}, {1: 3, 2: 3, 3: 6}, {1: 1}]
"""Draft counts of each step by sequence; a sequence without a count is not drafted."""

Synchronization = Literal["broadcast", "independent"]


class DraftingRanks(ScriptedScheduler):
    """Ranks of one world that propose draft tokens."""

    def __init__(
        self,
        folder: Path,
        synchronization: Synchronization = "broadcast",
        method: str = "off",
        draft: str = "",
    ) -> None:
        folder.mkdir()
        super().__init__(folder, method=method, draft_model=draft)
        self._synchronization = synchronization

    def send(self, rank: int, message: Message) -> None:
        """Send an order to one rank."""
        if isinstance(message, JoinWorld):
            message = msgspec.structs.replace(
                message,
                synchronization=self._synchronization,
                sharding="tensor" if message.world_size > 1 else "none",
            )
        super().send(rank, message)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Return the tokens of one rank without drafts."""
    ranks = DraftingRanks(tmp_path_factory.mktemp("one") / "r")
    try:
        ranks.join_rank_0()
        ranks.poll_until(lambda: bool(ranks.messages_of(RankReady)))
        assert ranks.messages_of(RankReady)[0].draft_bytes_per_token == 0
        world = PlannedWorld(ranks, PROMPTS, SAMPLING)
        world.prefill()
        for _ in range(STEPS * 7):
            world.step(decodes=list(PROMPTS))
        return world.tokens
    finally:
        ranks.close()


def _write_eagle_head(folder: Path) -> Path:
    """Write an EAGLE head with random weights for the demo model."""
    shapes = {
        "fc.weight": (192, 384),
        **{f"layers.0.self_attn.{one}_proj.weight": (192, 192) for one in "qkvo"},
        "layers.0.mlp.gate_proj.weight": (256, 192),
        "layers.0.mlp.up_proj.weight": (256, 192),
        "layers.0.mlp.down_proj.weight": (192, 256),
        "layers.0.post_attention_layernorm.weight": (192,),
    }
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(1)
    header: dict[str, Any] = {}
    payload = b""
    for name, shape in shapes.items():
        values = rng.normal(0.0, 0.1, shape).astype("<f4").tobytes()
        offsets = [len(payload), len(payload) + len(values)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        payload += values
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + payload
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("synchronization", ["broadcast", "independent"])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_that_ranks_propose_do_not_change_generated_tokens(
    tmp_path: Path,
    expected: dict[int, list[int]],
    method: str,
    synchronization: Synchronization,
) -> None:
    """Receipts are equal, and texts equal those of one rank without drafts.

    The demo model as its own draft model is nearly always right.
    """
    draft = "demo" if method == "draft_model" else str(_write_eagle_head(tmp_path / "head"))
    ranks = DraftingRanks(tmp_path / "r", synchronization, method, draft)
    proposed = accepted = 0
    try:
        for rank in range(2):
            ranks.start(rank, 2)
        for ready in ranks.join_world(2):
            assert ready.draft_bytes_per_token > 0
            assert ready.model_fingerprint.count("+") == 1
        world = PlannedWorld(ranks, PROMPTS, SAMPLING)
        world.prefill()
        rolled_back: list[RolledBack] = []
        behind = dict.fromkeys(PROMPTS, 0)
        for counts in COUNTS:
            lengths = {one: len(PROMPTS[one]) + len(world.tokens[one]) - 1 for one in PROMPTS}
            known = {one: PROMPTS[one] + world.tokens[one] for one in PROMPTS}
            chunks = [
                DraftChunk(sequence_id=one, start=start, tokens=known[one][start : lengths[one]])
                for one, start in behind.items()
                if method == "draft_model" and one in counts and start < lengths[one]
            ]
            tokens = world.step(
                rolled_back=rolled_back,
                draft_chunks=chunks,
                decodes=list(PROMPTS),
                draft_counts=[counts.get(one, -1) for one in PROMPTS],
            )
            lengths = {one: len(PROMPTS[one]) + len(world.tokens[one]) - 1 for one in PROMPTS}
            rolled_back = [
                RolledBack(sequence_id=one, length=lengths[one])
                for one, count in counts.items()
                if count > 0
            ]
            behind |= {one: lengths[one] for one in counts}
            proposed += sum(counts.values())
            accepted += sum(map(len, tokens)) - len(tokens)
    finally:
        ranks.close()

    assert accepted > (0.8 * proposed if method == "draft_model" else -1)
    for one, tokens_so_far in world.tokens.items():
        assert tokens_so_far == expected[one][: len(tokens_so_far)]
