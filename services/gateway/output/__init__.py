"""What a model writes, as events: text, reasoning and tool calls. Dialects translate them."""
