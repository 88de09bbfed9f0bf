"""What all tests share: Hypothesis judges what code does, not how long a busy machine takes."""

from hypothesis import HealthCheck, settings

# On top of the profile that is loaded: where tests run unattended, Hypothesis takes one of its own.
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")
