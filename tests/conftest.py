"""What all tests share: which examples Hypothesis takes.

The same ones in every run of `make test`: it says something about a change and nothing about luck,
and nobody waits for five minutes while a failure that has no part in the change is made smaller.
`make explore` takes new ones. Neither judges how long a busy machine takes.
"""

from hypothesis import HealthCheck, settings

# On top of the profile that is loaded: where tests run unattended, Hypothesis takes one of its own.
settings.register_profile(
    "explore", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("lockstep", settings.get_profile("explore"), derandomize=True)
settings.load_profile("lockstep")
