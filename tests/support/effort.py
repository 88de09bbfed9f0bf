"""How many cases a test tries: a few in `make test`, all of them in `make proofs`."""

import os

_IS_PROOF = os.environ.get("LOCKSTEP_PROOFS") == "1"


def cases(quick: int, full: int) -> int:
    """Return `full` in `make proofs`, else `quick`.

    A test that uses it has the mark `deep` or is a property test of Hypothesis: `make proofs` runs
    both a second time.
    """
    return full if _IS_PROOF else quick
