"""Distinct types for numbers and names in messages, so that mypy refuses mix-ups."""

from typing import NewType

SequenceId = NewType("SequenceId", int)
"""Identifies a sequence in the scheduler and the ranks. Never reused by one scheduler process."""

Epoch = NewType("Epoch", int)
"""Number of a world, from 1. A restart of any rank starts a new epoch. 0 means no world."""

StepId = NewType("StepId", int)
"""Number of a step within an epoch, from 1 without gaps."""

Slot = NewType("Slot", int)
"""Row of a sequence in the running batch, the same on every rank."""

PeerId = NewType("PeerId", bytes)
"""Routing identity of a process on a link, such as `rank-3-1f00d5eed` (role, number, random)."""

Incarnation = NewType("Incarnation", int)
"""Random number of a process or session, so that messages of an earlier one are recognised."""
