"""The refusal of a model whose form the fast path does not know."""


class UnknownForm(Exception):
    """A model is built in a way that the fast path does not know. The text says in which."""
