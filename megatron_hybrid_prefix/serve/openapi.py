"""The OpenAPI document of the server, made from the models that check requests, and a page that shows it without network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, ExplainBody, TokenizeBody
from megatron_hybrid_prefix.serve.fields import Fields

BODIES: dict[str, type[Fields]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/explain": ExplainBody,
}
"""Bodies by path."""
_SUMMARIES = {
    "post /v1/completions": "Continue a prompt",
    "post /v1/chat/completions": "Answer a conversation",
    "post /tokenize": "Token ids of a text or a chat",
    "post /detokenize": "Text of token ids",
    "get /tokenizer_info": "Special tokens as text, and the chat template",
    "get /v1/models": "The served model, with max_model_len",
    "get /v1/models/{name}": "The same for one model",
    "get /version": "Version of this package",
    "get /health": "503 if the engine has stopped, or if a step takes too long",
    "get /health_generate": "Generates one token",
    "get /metrics": "Metrics for Prometheus",
    "get /openapi.json": "This document",
    "get /docs": "This document as a page",
    "post /admin/explain": "What a request would reuse now, and why not more; needs the admin token",
    "post /admin/reset_cache": "Empties the prefix cache; needs the admin token",
}
_CONTENT = {"/metrics": "text/plain", "/docs": "text/html"}
_OPEN = ("/version", "/health", "/health_generate", "/metrics", "/openapi.json", "/docs")  # need no API key
_REPLIES = {
    "400": "The request is invalid: error.param names the field",
    "401": "The key is wrong or missing",
    "404": "There is no such model or path",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "No place is free: try again later",
    "500": "The engine failed",
    "503": "The server is stopping, or its engine has stopped",
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "one line"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "name of the field"},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_RANGES = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "minLength": "length from {}",
    "maxLength": "length to {}",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem } td, th { border: 1px solid #ccc; padding: .2rem .5rem;
text-align: left; vertical-align: top } code { background: #f2f2f2; padding: 0 .2rem } h2 { margin-top: 2rem }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } code { background: #333 } a { color: #8bf } }
"""


def document(model: str, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document, version 3.1.

    Args:
        model: Name of the served model, for the examples.
        needs_key: Whether requests need an API key.
    """
    _, definitions = models_json_schema(
        [(body, "validation") for body in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for route, summary in _SUMMARIES.items():
        method, _, path = route.partition(" ")
        paths.setdefault(path, {})[method] = _operation(path, summary, BODIES.get(path), model, needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "megatron_hybrid_prefix",
            "version": __version__,
            "description": "The OpenAI API for hybrid models, with prefix caching. Fields that are null count as absent; unknown "
            "fields are refused. usage.prompt_tokens_details.cached_tokens of a reply says how many prompt tokens were not computed.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"] | {"Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "an API key of --api-keys"},
                "admin": {"type": "http", "scheme": "bearer", "description": "the --admin-token"},
            },
        },
    }


def _operation(path: str, summary: str, body: Any, model: str, needs_key: bool) -> dict[str, Any]:
    security = "admin" if path.startswith("/admin") else "key" if needs_key and path not in _OPEN else None
    generates = path.startswith("/v1/") and body is not None
    statuses = ["400", "408", "413"] if body is not None else []
    statuses += ["401"] if security else []
    statuses += ["404"] if body is not None or "{" in path or security == "admin" else []
    statuses += ["429"] if generates else []
    statuses += ["500"] if generates or path == "/health_generate" else []
    statuses += ["503"] if generates or "health" in path or security == "admin" else []
    content: dict[str, Any] = {_CONTENT.get(path, "application/json"): {}}
    if generates:
        content["text/event-stream"] = {}  # with "stream": true
    found: dict[str, Any] = {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_").replace("{name}", "name"),
    }
    found["responses"] = {"200": {"description": "Success", "content": content}} | {
        status: {
            "description": _REPLIES[status],
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status in sorted(statuses)
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        examples: dict[str, Any] = {
            "/v1/completions": {"model": model, "prompt": "Hello", "max_tokens": 8},
            "/v1/chat/completions": {
                "model": model,
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 8,
            },
            "/tokenize": {"prompt": "Hello"},
            "/detokenize": {"tokens": [72, 105]},
            "/admin/explain": {"request": {"prompt": "Hello"}},
        }
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": examples[path]}},
        }
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if security is not None:
        found["security"] = [{security: []}]
    return found


def page(document: dict[str, Any]) -> str:
    """The document as an HTML page that loads nothing."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])} <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _route(method, path, operation, document["components"]["schemas"])
    return "\n".join(parts) + "\n"


def _route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}"
    if "security" in operation:
        yield " (with <code>authorization: Bearer</code>)"
    yield "</p>"
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]
        yield f"<p><code>{escape(json.dumps(body['example']))}</code></p>"
        yield from _fields(schemas[body["schema"]["$ref"].rpartition("/")[2]], schemas)
    yield "<p>Replies:</p><ul>"
    for status, reply in operation["responses"].items():
        yield f"<li>{status}: {escape(reply['description'])} ({escape(', '.join(reply['content']))})"
    yield "</ul>"


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    """A table of fields, then those of the objects in it."""
    yield "<table><tr><th>field<th>type<th>range<th>default<th></tr>"
    inner: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else json.dumps(field.get("default"))
        cells = [type_of(field), ", ".join(limits_of(field)), default, field.get("description", "")]
        yield f"<tr><td><code>{escape(name)}</code>" + "".join(f"<td>{_with_code(cell)}" for cell in cells) + "</tr>"
        for part in (field, field.get("items", {}), *field.get("anyOf", ())):
            if "$ref" in part:
                inner[name] = schemas[part["$ref"].rpartition("/")[2]]
    yield "</table>"
    for name, own in inner.items():
        yield f"<p><code>{escape(name)}</code>: {_with_code(own.get('description', ''))}</p>"
        yield from _fields(own, schemas)


def _with_code(text: str) -> str:
    """Escaped text, with what stands between backticks as code."""
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", escape(text))


def type_of(field: dict[str, Any]) -> str:
    """The types of a field of a JSON schema, in words."""
    if "$ref" in field:
        return "object"
    if "anyOf" in field:
        return " or ".join(type_of(option) for option in field["anyOf"] if option.get("type") != "null")
    if field.get("type") == "array":
        inner = type_of(field["items"])
        return f"array of ({inner})" if " or " in inner else f"array of {inner}"
    return str(field.get("type", "any"))


def limits_of(field: dict[str, Any]) -> Iterator[str]:
    """The limits of a field of a JSON schema, in words."""
    for part in (field, *field.get("anyOf", ())):
        for key, text in _RANGES.items():
            if key in part:
                value = part[key]
                yield text.format(int(value) if float(value).is_integer() else value)
