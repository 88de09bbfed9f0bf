"""The stored tier of one rank: spills to files and restores from files, beside the steps.

It never delays a step: a failing disk or store only loses a spill or shortens a restore. The
tier's thread owns all state and reads no file; the disk threads read and write. The main thread and
the thread of the scheduler link hand over work and never wait.
"""
