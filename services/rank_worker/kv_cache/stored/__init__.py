"""The stored tier of one rank: spills to files and restores from them, beside the steps.

Nothing here decides what is stored, and nothing here may disturb a step: a disk or a store that
fails is a lost spill, or a restore of fewer blocks.

One thread (`link`) speaks to the cache store and holds all state; it never touches a file. Others
(`disk`) read and write. The main thread hands spills over and takes what a plan adopts; the bus
thread hands restores over; neither waits.
"""

from services.rank_worker.kv_cache.stored.tier import StoredTier, TierSettings

__all__ = ["StoredTier", "TierSettings"]
