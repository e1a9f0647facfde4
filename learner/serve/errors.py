"""Answers that are not 200, as exceptions of the request handlers."""

from __future__ import annotations


class AnswerError(Exception):
    """Base: becomes vLLM's error body with this status."""

    status = 500
    kind = "InternalServerError"
    field: str | None = None


class InferenceFailed(AnswerError):
    """The server's own failure: HTTP 500."""


class RequestError(AnswerError):
    """The client's mistake: HTTP 400 with a message that names field, value and remedy."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {shorten(value)}: {remedy}")
        self.field = field


class QueueFull(RequestError):
    """More requests are waiting than the server holds: HTTP 429, try again later."""

    status = 429
    kind = "TooManyRequestsError"


def shorten(value: object, limit: int = 100) -> str:
    """`repr`, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
