"""What all tests share: which examples Hypothesis takes.

The same ones in every run of `make test` until the code changes: whether a change is good is then
no matter of luck, and nobody waits for minutes while an old failure is made smaller. `make explore`
takes new ones. Neither judges how long a busy machine takes.
"""

from hypothesis import HealthCheck, settings

# Where tests run unattended, Hypothesis loads a profile of its own, which keeps no failures.
settings.register_profile(
    "explore",
    settings.get_profile("default"),
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("lockstep", settings.get_profile("explore"), derandomize=True)
settings.load_profile("lockstep")
