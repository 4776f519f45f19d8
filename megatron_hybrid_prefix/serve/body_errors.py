"""pydantic's errors in the format of the API."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from megatron_hybrid_prefix.serve.errors import ApiError, bad, short, wrong_type

_TYPES = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}
# Fields that accept more than one type.
_EXPECTED = {
    "cache_breakpoints": "an array of integers",
    "logit_bias": "an object of numbers by token id",
    "stop_token_ids": "an array of integers",
    "token_ids": "an array of integers",
    "content": "a string or an array of parts",
    "messages": "an array of objects",
    "prompt": "a string, or an array of strings, of token ids or of arrays of token ids",
    "stop": "a string or an array of strings",
}
_LIMITS = {
    "greater_than": "must be above {gt}, not {}",
    "greater_than_equal": "must be at least {ge}, not {}",
    "less_than_equal": "must be at most {le}, not {}",
    "string_unicode": "is not valid text: it has half of a surrogate pair",
    "too_long": "must have a length of at most {max_length}",
    "too_short": "must have a length of at least {min_length}",
}


def api_error(problems: list[ErrorDetails]) -> ApiError:
    """Status 400: the first of pydantic's problems that says most, in the words of the API."""
    # Report unsupported fields first. If a field accepts several types, report the error of the type that was given.
    first = next((problem for problem in problems if problem["type"] == "unsupported_parameter"), problems[0])
    of_field = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    problem = next((problem for problem in of_field if problem["type"] not in _TYPES), first)
    kind, context, param = problem["type"], problem.get("ctx", {}), _param(problem["loc"])
    if "name" in context:
        name = short(context["name"])
        param, name = (param, f"{param}.{name}") if param else (name, name)
    else:
        name = param
    if kind == "missing":
        return bad(f"Missing required parameter: '{name}'.", param, "missing_required_parameter")
    if kind == "unknown_parameter":
        return bad(f"Unknown parameter: '{name}'.", param, kind)
    if kind == "unsupported_parameter":
        unless = f" unless it is {context['unless']}" if "unless" in context else ""
        return bad(f"'{name}' is not supported by this server{unless}.", param, kind)
    if kind in _TYPES:
        return wrong_type(param, _EXPECTED.get(param.rpartition(".")[2], _TYPES[kind]), problem["input"])
    if kind in _LIMITS:
        return bad(f"'{name}' {_LIMITS[kind].format(short(problem['input']), **context)}.", param)
    return bad(f"Invalid '{name}': {problem['msg']}.", name if "name" in context else param)


def _param(location: tuple[int | str, ...]) -> str:
    """The field's path for messages and stream options (messages[0].role), for other fields its name."""
    whole = location if location[:1] in (("messages",), ("stream_options",)) else location[:1]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in whole).removeprefix(".")
