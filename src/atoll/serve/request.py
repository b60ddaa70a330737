"""Requests as OpenAI's client sends them, with Atoll's own settings beside, and errors as it reads them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.base.errors import nearest

LONGEST = 32_000
"""Characters of a prompt, as OpenAI allows."""
EVERY_STRATEGY = ("full", "top-1", "top-2", "once", "once null sample-1")
"""Strategies that are listed as models of their own; `routing` takes any."""


class ImageRequest(BaseModel):
    """`POST /v1/images/generations`; `quality`, `style`, `background`, `moderation`, `user` do nothing."""

    # Unknown fields are refused: with `stepz` ignored, another picture would be drawn silently.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # All but the prompt may be null, as clients write what they were not given.
    prompt: str = Field(max_length=LONGEST)
    model: str | None = None
    n: int | None = Field(default=None, ge=1)
    size: str | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100)
    stream: bool | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1)
    guidance: float | None = Field(default=None, ge=0, le=1e6)
    shift: float | None = Field(default=None, gt=0, le=1e4)
    routing: str | None = Field(default=None, max_length=200)
    negative: str | None = Field(default=None, max_length=LONGEST)
    quality: str | None = None
    style: str | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = None
    user: str | None = None


class ApiError(Exception):
    """What is answered in place of pictures: a status, a body as OpenAI's client reads it, and headers.

    With `after`, the client should try again in so many seconds; else a retry would repeat the error.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, after: float | None = None
    ) -> None:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        retry = {"x-should-retry": "false"}
        self.headers = retry if after is None else {"Retry-After": str(max(1, round(after)))}
        super().__init__(message)


def parse(body: Any) -> ImageRequest:
    """The request in a JSON value; `ApiError` names the first field that is wrong."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object", "invalid_json")
    try:
        return ImageRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else None
        what, code = f"{name}: {first['msg']}", "invalid_value"
        if first["type"] == "missing":
            code = "missing_required_parameter"
        elif first["type"] == "extra_forbidden":
            hint = nearest(str(name)[:100], ImageRequest.model_fields)
            what, code = f"there is no field {str(name)[:100]!r}: {hint}", "unknown_parameter"
        raise ApiError(400, what, code, name) from None


def split_model(name: str | None, models: list[str]) -> tuple[str, str | None]:
    """The model and the strategy that a name such as `ensemble:top-1` means; `ApiError` if there is none."""
    base, _, routing = (name or models[0]).partition(":")
    if base not in models or (routing and base != "ensemble"):
        hint = nearest(str(name)[:100], listed(models))
        raise ApiError(404, f"there is no model {str(name)[:100]!r}: {hint}", "model_not_found", "model")
    return base, routing or None


def listed(models: list[str]) -> list[str]:
    """Names under which the models can be asked for."""
    strategies = [f"ensemble:{strategy}" for strategy in EVERY_STRATEGY] if "ensemble" in models else []
    return [*models, *strategies]
