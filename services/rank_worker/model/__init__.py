"""The model of a rank: download, loading, sharding and forward passes."""
