"""The random key of a draw: a function of the seed and the position, and nothing else.

The key is output number `position` of the SplitMix64 generator (Steele, Lea, Flood 2014) whose
state starts at the mixed seed. Changing it changes what every seeded request returns: a test holds
the values.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: SplitMix64's increment."""


def mix(value: int) -> int:
    """Return SplitMix64's finalizer of a 64-bit number: a bijection in which every bit matters."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def start(seed: int) -> int:
    """Return the state that all keys of one sequence follow from; near seeds lie far apart."""
    return mix((seed + _GAMMA) & _MASK)


def key(state: int, position: int) -> tuple[int, int]:
    """Return the key of one draw.

    Args:
        state: what `start` returned.
        position: index of the new token in its whole sequence: the number of tokens before it.

    Returns:
        Two 32-bit words, high and low: what `mlx.core.random` takes as a key.
    """
    value = mix((state + (position + 1) * _GAMMA) & _MASK)
    return value >> 32, value & 0xFFFFFFFF
