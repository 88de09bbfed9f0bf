"""Everything that makes the built-in demo model: data, tokenizer, network, training, export."""
