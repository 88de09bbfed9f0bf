"""Profiles of Hypothesis for all tests.

`make test` takes the same examples in every run until the code changes, so that a test result does
not depend on chance and no run spends minutes on shrinking an old failure. `make explore` takes new
examples. Neither measures how long an example takes, because the machine may be busy.
"""

from hypothesis import HealthCheck, settings

# In CI, Hypothesis loads a profile of its own, which does not save failing examples. The profiles
# here are therefore based on "default".
settings.register_profile(
    "explore",
    settings.get_profile("default"),
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("lockstep", settings.get_profile("explore"), derandomize=True)
settings.load_profile("lockstep")
