"""The model of a rank: checkpoint, loading, sharding, forward."""
