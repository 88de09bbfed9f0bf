"""Training of the built-in demo model: data, tokenizer, network, optimizer and export."""
