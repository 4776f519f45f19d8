"""Errors in the format of the OpenAI API."""

from __future__ import annotations

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
        type = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Status 400: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def stopping() -> ApiError:
    """Status 503: the server is told to stop."""
    return ApiError(503, "The server is shutting down.", code="server_stopping")


def model_not_found(model: str) -> ApiError:
    """Status 404: there is no model with this name."""
    message = f"The model '{short(model)}' does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def short(value: Any) -> str:
    """The value as text, at most 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
