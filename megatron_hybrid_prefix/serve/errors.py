"""Errors in the format of the OpenAI API."""

from __future__ import annotations

import math
from typing import Any


class ApiError(Exception):
    """An error response. Its type follows from the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        # They may quote the request: text with half of a surrogate pair cannot be sent.
        message, param = encodable(message), None if param is None else encodable(param)
        type = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Status 400: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def stopping() -> ApiError:
    """Status 503: the server is told to stop."""
    return ApiError(503, "The server is shutting down.", code="server_stopping")


def wrong_type(param: str, wanted: str, value: Any) -> ApiError:
    """Status 400: a field has the wrong type. ``wanted`` describes the right one."""
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    got = "null" if value is None else kinds.get(type(value), "an object")
    if isinstance(value, float) and not math.isfinite(value):
        got = "a number out of range"
    return bad(f"Invalid type for '{param}': expected {wanted}, but got {got} instead.", param, "invalid_type")


def model_not_found(model: str) -> ApiError:
    """Status 404: there is no model with this name."""
    message = f"The model '{short(model)}' does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs escaped, so that it can be sent and logged."""
    return text.encode("utf-8", "backslashreplace").decode()


def short(value: Any) -> str:
    """The value as text, at most 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
