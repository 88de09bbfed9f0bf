"""A head and an embedding that real ranks divide by token ids, compared with whole ones."""

from pathlib import Path

import pytest

from shared.messages import Grammar, RequestFinished, Sampling
from shared.model.location import demo_folder
from tests.multirank.worlds.cluster import Client, cluster
from tests.multirank.worlds.saved_model import save_model
from tests.support.waiting import wait_until

END = 2041
WORDS = Grammar(text=r"start: /[a-z]{2,9}(, [a-z]{2,9}){4,9}/", end_ids=[END])
SAMPLINGS = {
    "greedy": Sampling(seed=1, temperature=0.0),
    "random": Sampling(seed=2, temperature=0.9),
    "top_k": Sampling(seed=3, temperature=1.0, top_k=20),
    "top_k and top_p": Sampling(seed=4, temperature=1.1, top_k=40, top_p=0.9, min_p=0.01),
    # The next two need all logits.
    "many top_k": Sampling(seed=5, temperature=0.9, top_k=100),
    "top_p": Sampling(seed=6, temperature=0.8, top_p=0.9),
    "min_p": Sampling(seed=7, temperature=1.2, min_p=0.05),
    "penalties": Sampling(
        seed=8,
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    ),
    "bias": Sampling(seed=9, temperature=0.8, logit_bias=[(15, 3.0), (200, 4.0), (30, -9.0)]),
    "log probabilities": Sampling(seed=10, temperature=0.9, top_logprobs=20),
    "greedy log probabilities": Sampling(seed=11, temperature=0.0, top_logprobs=0),
}
UNEVEN = 212
"""A vocabulary that 4 ranks divide into 64, 64, 64 and 20 tokens."""


def _generate(client: Client, vocab_size: int, *, grammar: bool) -> dict[str, list[int]]:
    """Send a request with each setting at once, and return the tokens of each."""
    prompt = [(7 * place + 3) % vocab_size for place in range(30)]
    for name, sampling in SAMPLINGS.items():
        client.submit(name, prompt, max_tokens=24, sampling=sampling)
        if grammar:
            constrained = f"{name}, with a grammar"
            client.submit(
                constrained,
                prompt,
                max_tokens=24,
                stop_ids=[END],
                sampling=sampling,
                grammar=WORDS,
            )
    client.wait_for_ends(list(client.tokens), 120.0)
    assert all(isinstance(one, RequestFinished) for one in client.ends.values()), client.ends
    counters = client.query_status().counters
    assert counters.get("receipts_mismatched_total", 0.0) == 0.0
    assert counters["epochs_total"] == 1.0
    return dict(client.tokens)


@pytest.fixture(scope="module")
def demo_tokens() -> dict[str, list[int]]:
    """The tokens of the demo model, whose head is its embedding, on one rank."""
    with cluster(1) as client:
        return _generate(client, 2_048, grammar=True)


@pytest.mark.proof
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "split", "method", "synchronization"),
    [
        (2, "head", "off", "broadcast"),
        (2, "head", "ngram", "independent"),
        (2, "head", "draft_model", "broadcast"),
        (2, "head", "eagle", "independent"),
        (4, "head", "off", "independent"),
        (4, "head", "eagle", "broadcast"),
    ],
)
def test_demo_model_with_divided_head_and_embedding_generates_tokens_of_one_rank(
    demo_tokens: dict[str, list[int]], ranks: int, split: str, method: str, synchronization: str
) -> None:
    """One matrix is both; drafts of every kind are verified, and grammars mask the parts."""
    drafters = {"draft_model": "demo-draft", "eagle": "demo-eagle"}
    settings = {"WORLD_SPLIT_VOCABULARY": split, "SPECULATION_METHOD": method}
    if method in drafters:
        settings["SPECULATION_DRAFT_MODEL"] = str(demo_folder().parent / drafters[method])
    with cluster(ranks, WORLD_SYNCHRONIZATION=synchronization, **settings) as client:
        assert _generate(client, 2_048, grammar=True) == demo_tokens
        status = client.query_status()
        assert all("of 2048 of model.embed_tokens" in one.share for one in status.ranks)
        # Ranks report once a second.
        wait_until(lambda: client.query_status().counters["head_gathered_steps_total"] > 0, 5.0)


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_separate_head_and_embedding_on_1_2_and_4_ranks_generate_the_same_tokens(
    tmp_path: Path,
) -> None:
    """A dense model and one with experts, whose vocabulary 4 ranks cannot divide evenly."""
    for family, sharding, most_ranks in (("qwen2", "tensor", 2), ("qwen3_moe", "expert", 4)):
        model = tmp_path / family
        save_model(model, family, vocab_size=UNEVEN, num_key_value_heads=4)
        expected: dict[str, list[int]] = {}
        for ranks, split in ((1, "off"), (most_ranks, "all")):
            settings = {
                "MODEL_PATH": str(model),
                "WORLD_SHARDING": sharding,
                "WORLD_SPLIT_VOCABULARY": split,
            }
            with cluster(ranks, **settings) as client:
                found = _generate(client, UNEVEN, grammar=False)
                expected = expected or found
                assert found == expected, (family, ranks, split)
                shares = [one.share for one in client.query_status().ranks]
                assert all(("lm_head" in one) == (split != "off") for one in shares), shares
                assert all(("embed_tokens" in one) == (split == "all") for one in shares), shares
