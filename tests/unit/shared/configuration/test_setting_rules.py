"""Rules between settings: contradictions are errors, settings without effect give warnings."""

from typing import Any

import pytest

from shared.configuration.loading import config_from_tree, load_config
from shared.configuration.setting_rules import settings_without_effect
from shared.errors import ConfigError

JACCL = {
    "size": 2,
    "backend": "jaccl",
    "jaccl_devices": "devices.json",
    "jaccl_coordinator": "10.0.0.1:9000",
}


INVARIANT = {"rank_worker": {"batch_invariant": True}}
PIPELINE = {"sharding": "pipeline", "enable_pipeline": True}


@pytest.mark.parametrize(
    ("tree", "expected_words"),
    [
        ({"world": {"size": 2, "backend": "off"}}, "set world.backend to ring"),
        ({"world": {**JACCL, "jaccl_devices": ""}}, "--distributed-ibv-devices"),
        ({"world": {**JACCL, "jaccl_coordinator": ""}}, "--distributed-jaccl-coordinator"),
        ({"world": {**JACCL, "jaccl_coordinator": "10.0.0.1"}}, "write host:port"),
        ({"world": {**JACCL, "jaccl_coordinator": "10.0.0.1:x"}}, "write host:port"),
        ({"world": {**JACCL, "jaccl_coordinator": "::1:9"}}, "IPv4"),
        ({"world": {"size": 2, "sharding": "pipeline"}}, "--enable-pipeline-distributed"),
        ({"world": {"sharding": "pipeline"}}, "--enable-pipeline-distributed"),
        ({"world": {"size": 2, "backend": "nccl", **PIPELINE}}, "no send and receive over nccl"),
        ({"world": {"size": 2, "data_host": "0.0.0.0"}}, "data_host is '0.0.0.0', which is not"),
        ({"world": {"size": 2, "data_host": "10.0.0.300"}}, "neither an address nor a name"),
        ({"world": {**JACCL, "jaccl_coordinator": "0.0.0.0:9000"}}, "that all ranks reach"),
        ({"speculation": {"method": "draft_model"}}, "draft_model.*--draft-model"),
        ({"speculation": {"method": "eagle"}}, "eagle.*--draft-model"),
        ({**INVARIANT, "speculation": {"method": "ngram"}}, "speculation.method is ngram, not off"),
        ({**INVARIANT, "world": {"size": 3}}, "world.size is 3, more than 2"),
        (
            {**INVARIANT, "world": {"size": 2, "split_vocabulary": "head"}},
            "world.split_vocabulary is head",
        ),
        (
            {"rank_worker": {"batch_invariant": True, "fast_path": "off"}},
            "rank_worker.fast_path is off",
        ),
    ],
)
def test_contradicting_settings_are_refused_with_remedy(
    tree: dict[str, Any], expected_words: str
) -> None:
    """The error is one sentence with the settings and the remedy."""
    with pytest.raises(ConfigError, match=expected_words) as refused:
        config_from_tree(tree)

    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    "tree",
    [
        {"world": JACCL},
        {"world": {"size": 2, "backend": "jaccl", "hostfile": "hosts.json"}},
        {"world": {"size": 2, "sharding": "pipeline", "enable_pipeline": True}},
        {"world": {"size": 2, "sharding": "expert"}},
        {"world": {"size": 2, "sharding": "tensor+expert", "expert_shares": [1, 2]}},
        {"speculation": {"method": "eagle", "draft_model": "a/b"}},
        {"speculation": {"method": "ngram"}},
        {**INVARIANT, "world": {"size": 2}},
        {},
    ],
)
def test_consistent_settings_give_no_warning(tree: dict[str, Any]) -> None:
    """Settings that fit together give no error and no warning."""
    assert settings_without_effect(config_from_tree(tree)) == []


@pytest.mark.parametrize(
    ("tree", "expected_words"),
    [
        (
            {"world": {"backend": "off", "hostfile": "h"}},
            ["world.hostfile has no effect: world.backend is off"],
        ),
        (
            {"world": {"backend": "off", "jaccl_devices": "d", "jaccl_coordinator": "a:1",
                       "jaccl_fallback": "ring", "sharding": "tensor", "enable_pipeline": True}},
            ["world.sharding", "world.enable_pipeline", "world.jaccl_devices",
             "world.jaccl_coordinator", "world.jaccl_fallback"],
        ),
        ({"world": {"sharding": "tensor"}}, ["there is only one rank (--ranks)"]),
        ({"world": {"backend": "ring"}}, ["world.backend has no effect: there is only one rank"]),
        ({"world": {"backend": "nccl"}}, ["world.backend has no effect: there is only one rank"]),
        (
            {"world": {**JACCL, "size": 1}},
            ["world.backend has no effect", "world.jaccl_devices", "world.jaccl_coordinator"],
        ),
        ({"world": {"backend": "jaccl"}}, ["world.backend has no effect: there is only one rank"]),
        (
            {"world": {"canary_prompt_s": 9.0}},
            ["world.canary_prompt_s has no effect: there is only one rank"],
        ),
        (
            {"world": {"size": 2, "canary_prompt_s": 9.0, "canary": False}},
            ["world.canary_prompt_s has no effect: world.canary is off"],
        ),
        ({"world": {"sharding": "expert"}}, ["not split over 1 rank by expert"]),
        ({"world": {"sharding": "tensor+expert"}}, ["not split over 1 rank by tensor+expert"]),
        (
            {"world": {"size": 2, "expert_shares": [1, 2]}},
            ["world.sharding is tensor, not expert or tensor+expert"],
        ),
        (
            {"world": {"sharding": "pipeline", "enable_pipeline": True}},
            ["world.enable_pipeline", "not split over 1 rank by pipeline"],
        ),
        (
            {"world": {"size": 2, "backend": "ring", "jaccl_devices": "d"}},
            ["world.jaccl_devices has no effect: world.backend is ring, not jaccl"],
        ),
        ({"world": {**JACCL, "metal_fast_synch": "on"}}, ["block a Mac's GPU"]),
        ({"world": {**JACCL, **PIPELINE}}, ["send and receive over jaccl have given wrong data"]),
        (
            {"speculation": {"method": "ngram", "draft_model": "a/b"}},
            ["speculation.draft_model has no effect: speculation.method is ngram"],
        ),
    ],
)  # fmt: skip
def test_each_setting_without_effect_gives_one_warning_sentence(
    tree: dict[str, Any], expected_words: list[str]
) -> None:
    """Each setting without effect gives one sentence, in a stable order."""
    warnings = settings_without_effect(config_from_tree(tree))

    assert len(warnings) == len(expected_words)
    pairs = zip(expected_words, warnings, strict=True)
    assert [word for word, sentence in pairs if word not in sentence] == []
    assert all(sentence.endswith(".") for sentence in warnings)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("world.backend", "'foo' is not one of auto, off, ring, nccl, jaccl"),
        ("world.sharding", "'foo' is not one of auto, tensor, expert, tensor+expert, pipeline"),
        ("speculation.method", "'foo' is not one of off, ngram, draft_model, eagle"),
        ("rank_worker.kv_bits", "got `str`; it is one of 0, 4, 8"),
    ],
)
def test_error_for_invalid_setting_value_lists_valid_choices(key: str, expected: str) -> None:
    """The error for an invalid choice lists the valid ones."""
    with pytest.raises(ConfigError) as refused:
        load_config(flags={key: "foo"})

    assert str(refused.value).startswith(f"Setting {key}: ")
    assert expected in str(refused.value)
