"""Errors that tell a user what cannot work, why, and what to do."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """A model, or something a model uses, that cannot be decoded exactly. One line: what, why, remedy."""

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}; {remedy}")
        self.what = what
        self.why = why
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[UnsupportedModelError], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.remedy)


class LoadError(ValueError):
    """A model that cannot be loaded; one line that ends with the remedy."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line without its full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:; ")
