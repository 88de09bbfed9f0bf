"""The rank worker: one device, its shard of the model, and no will of its own."""
