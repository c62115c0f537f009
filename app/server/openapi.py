"""GET /openapi.json: the paths, and the bodies that they take, by the types that read them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from .requests import ChatRequest, CompletionRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    400: "What is wrong with the request, and which field.",
    401: "No key, or a wrong one.",
    403: "A page, or a name of this server, that is not allowed.",
    404: "There is no such path or model.",
    408: "The body did not come.",
    413: "The body is too long.",
    429: "Too many answers wait; Retry-After says when to come again.",
    500: "The answer failed.",
    503: "The server is ending.",
}


@cache
def document() -> dict[str, Any]:
    """The description, in OpenAPI 3.1."""
    bodies, components = msgspec.json.schema_components(
        (ChatRequest, CompletionRequest), ref_template="#/components/schemas/{name}"
    )
    chat, completion = bodies
    return {
        "openapi": "3.1.0",
        "info": {"title": "floe-chat", "version": version("floe-chat")},
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
        "paths": {
            "/health": {"get": _operation("Whether the server answers.")},
            "/metrics": {"get": _operation("Figures for Prometheus.", kind="text/plain")},
            "/v1/models": {"get": _operation("The model that answers here.")},
            "/v1/models/{name}": {"get": _operation("The same, by its name.", named=True)},
            "/v1/chat/completions": {"post": _operation("The answer to a chat.", chat)},
            "/v1/completions": {"post": _operation("What follows a text.", completion)},
        },
    }


def _operation(
    summary: str,
    body: dict[str, Any] | None = None,
    kind: str = "application/json",
    *,
    named: bool = False,
) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {}}
    if body is not None:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {str(code): {"description": text, "content": error} for code, text in _REFUSALS.items()}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **refusals},
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if named:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name]
    return found
