"""Keys of random draws: frozen values and distinctness."""

from services.rank_worker.sampling import keys


def test_key_mixer_gives_published_splitmix64_outputs() -> None:
    """The first outputs for state 1234567 equal those of the published SplitMix64."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1_234_567 + i * gamma) % 2**64 for i in (1, 2, 3)]

    assert [keys.mix(state) for state in states] == [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
    ]


def test_sampling_keys_equal_frozen_values() -> None:
    """Keys equal frozen values; a change would change every seeded completion."""
    got = {
        (seed, position): keys.draw_key(keys.initial_state(seed), position)
        for seed in (0, 1, 2**63 - 1)
        for position in (0, 1, 1_000_000)
    }

    assert got == FROZEN


def test_neighbouring_seeds_and_positions_have_distinct_sampling_keys() -> None:
    """100 seeds and 100 positions give 10,000 distinct keys."""
    drawn = {
        keys.draw_key(keys.initial_state(seed), position)
        for seed in range(100)
        for position in range(100)
    }

    assert len(drawn) == 10_000


FROZEN = {
    (0, 0): (2802244911, 1293516399),
    (0, 1): (3011683077, 4097920862),
    (0, 1_000_000): (639857998, 895080843),
    (1, 0): (1581361928, 1949917470),
    (1, 1): (4052577513, 1030549998),
    (1, 1_000_000): (2988583853, 4160421343),
    (2**63 - 1, 0): (1774836106, 2261110046),
    (2**63 - 1, 1): (2139386250, 773771801),
    (2**63 - 1, 1_000_000): (1711749590, 3201427914),
}
