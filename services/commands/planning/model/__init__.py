"""Memory of a checkpoint from its headers: weights, KV and recurrent state."""
