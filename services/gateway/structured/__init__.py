"""Structured output: grammars of answers, from what clients ask for and what models write."""
