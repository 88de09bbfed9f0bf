"""Random keys of sampling, counter-based: a function of the seed and the position alone.

The key is output number `position` of the SplitMix64 generator whose state starts at the mixed
seed. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014). A change
of the keys changes the result of every seeded request; a test fixes their values.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
"""Increment of SplitMix64: 2**64 divided by the golden ratio, made odd."""


def mix(value: int) -> int:
    """Return a number in which every bit depends on all bits of `value` (SplitMix64's finalizer).

    A bijection on 64-bit numbers.
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def initial_state(seed: int) -> int:
    """Return the 64-bit state from which all keys of a sequence follow.

    Args:
        seed: the request's seed; similar seeds give unrelated states.
    """
    return mix((seed + _GAMMA) & _MASK)


def draw_key(state: int, position: int) -> tuple[int, int]:
    """Return the key for sampling the token at one position.

    Args:
        state: from `initial_state`.
        position: of the new token in its sequence: the number of tokens before it, prompt included.

    Returns:
        Two 32-bit words, high and low, in the form of an `mlx.core.random` key.
    """
    value = mix((state + (position + 1) * _GAMMA) & _MASK)
    return value >> 32, value & 0xFFFFFFFF
