"""Grammars of running sequences: matchers, and the masks of tokens that they allow."""
