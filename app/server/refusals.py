"""Refusals in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from ...models.errors import FloeError, TryAgainError, UsageError
from ..client.prompt import FieldError, TooLongPromptError

_LONGEST = 1_000  # characters of a message, or of a field's name
_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class RefusedError(Exception):
    """A request that gets no answer.

    Attributes:
        status: of HTTP. message: what is wrong, and what to do. field: of the body, None for all of it. code: a word
            for programs. headers: to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, _short(message), field and _short(field), code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}

    def response(self) -> JSONResponse:
        """As HTTP."""
        return JSONResponse(self.body, self.status, self.headers)


def _short(text: str) -> str:
    """Without the middle of what repeats a request's own long text."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def refusal(error: FloeError) -> RefusedError:
    """What a client is told of an error of ours: those of use are the request's fault, all others are not."""
    code = "context_length_exceeded" if isinstance(error, TooLongPromptError) else None
    field = None
    if isinstance(error, FieldError):
        field, code = error.field, "invalid_value"
    status = 400 if isinstance(error, UsageError) else 503 if isinstance(error, TryAgainError) else 500
    return RefusedError(status, " ".join(filter(None, (f"{error.title}.", error.cause, error.hint))), field, code)
