"""OpenAI's Responses API: items in, items out, as Codex and OpenAI's clients use it."""
