"""Distinct types for the numbers and names that cross a process, so that mypy refuses a mix-up."""

from typing import NewType

SequenceId = NewType("SequenceId", int)
"""Names one sequence inside the scheduler and the ranks. Never reused within a scheduler's life."""

Epoch = NewType("Epoch", int)
"""One life of the world. Every restart of any rank starts a new one. From 1; 0 means "no world"."""

StepId = NewType("StepId", int)
"""Number of one step within an epoch. From 1, without gaps."""

Slot = NewType("Slot", int)
"""A sequence's row in the running batch, the same number on every rank."""

PeerId = NewType("PeerId", bytes)
"""Routing id of one process on a link."""

Incarnation = NewType("Incarnation", int)
"""Random 63-bit number drawn once by each process; a restarted process has another one."""
