"""What a checkpoint's headers say about memory: weights, KV and recurrent state."""
