"""Loading: the weight files of a model become this rank's shard in memory."""
