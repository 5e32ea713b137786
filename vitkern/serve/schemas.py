"""The JSON that goes out, errors included, as OpenAPI describes it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Class(BaseModel):
    """A class and how likely it is."""

    index: int = Field(description="number of the class, from 0", examples=[285])
    label: str = Field(description="its name", examples=["Egyptian cat"])
    probability: float = Field(ge=0, le=1, description="softmax of the logits")


class Attention(BaseModel):
    """Attention rollout: which patches the answer depends on."""

    weights: list[list[float]] = Field(
        description="a row of patches after the other, from the top; the largest is 1"
    )
    part: list[float] = Field(
        min_length=4,
        max_length=4,
        description="left, top, right and bottom of what the model saw, as shares of the upright"
        " picture's sides; they pass 0 and 1 where a picture is narrower than the model's crop",
    )


class Prediction(BaseModel):
    """The likeliest classes, best first."""

    model: str = Field(description="file of the weights")
    top: list[Class]
    attention: Attention | None = Field(default=None, description="if asked for")


class Embedding(BaseModel):
    """One vector for the picture."""

    model: str = Field(description="file of the weights")
    pool: str = Field(description="token: the class token; mean: mean of the patches")
    embedding: list[float] = Field(description="as wide as the model")


class State(BaseModel):
    """Whether the server works."""

    status: str = Field(examples=["ok", "ready", "stopping", "broken"])


class About(BaseModel):
    """What runs here, and what it takes."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    precision: str
    threads: int
    classes: int = Field(description="0: no classifier, /embed alone answers")
    pools: list[str] = Field(description="what /embed can be asked for, the model's own first")
    attention: bool = Field(description="whether /predict can show attention")
    image_size: list[int] = Field(description="rows and columns that the model sees")
    max_batch: int
    max_wait_ms: float
    queue: int
    max_bytes: int
    max_pixels: int


class Problem(BaseModel):
    """Why there is no answer, for programs and for people."""

    error: str = Field(description="a word for programs", examples=["too_many_pixels"])
    message: str = Field(description="what came, what was wanted, what to do")


_RETRY = {
    "Retry-After": {
        "description": "seconds until a place is likely",
        "schema": {"type": "integer", "minimum": 1},
    }
}


def _problem(description: str, **more: Any) -> dict[str, Any]:
    return {"model": Problem, "description": description, **more}


# Of everything that takes a picture.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: _problem("the body is empty, no form with one file, or not what its headers say"),
    408: _problem("the body did not come in time"),
    413: _problem("too many bytes, or more pixels than are decoded"),
    415: _problem("a media type that holds no picture"),
    422: _problem("no picture that can be decoded, or a parameter that cannot be used"),
    429: _problem("as many pictures wait as may: come back later", headers=_RETRY),
    500: _problem("the model failed"),
    503: _problem("the server is stopping", headers=_RETRY),
}

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
# FastAPI describes bodies that it parses itself; this one is read with a limit (uploads.py).
IMAGE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "a picture as it is, or a form with one file",
        "content": {
            **dict.fromkeys(_TYPES, _BINARY),
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "string", "format": "binary"}},
                    "required": ["image"],
                },
                "encoding": {"image": {"contentType": "image/jpeg, image/png, image/webp"}},
            },
        },
    }
}
