"""OpenAI's API: request and answer types, validation, response formats."""
