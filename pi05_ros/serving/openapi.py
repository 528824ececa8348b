"""``/openapi.json``: the JSON part of the routes, made from the schemas that check the requests."""

from __future__ import annotations

from typing import Any

from pi05_ros import __version__
from pi05_ros.serving.schema import GenerationRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "details"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
        "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
}
_REPLY = {
    "type": "object",
    "description": "Envelope (`object` is `action.generation`) or, with `runtime.response_format` raw, the policy's "
    "payload (`request_id`, `actions`, `parameters`).",
}
_REFUSALS = {
    "400": "malformed, unknown or missing camera, missing state, wrong shape, not finite",
    "401": "no key or a wrong one",
    "403": "Host or Origin is not allowed",
    "404": "the model is not served",
    "413": "too large",
    "415": "neither JSON nor msgpack",
    "422": "the network's output for this observation is not usable",
    "429": "the queue is full",
    "503": "the policy is not active",
    "504": "the deadline passed",
}


def openapi(asks_for_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    schema = GenerationRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = schema.pop("$defs", {})
    schemas |= {"GenerationRequest": schema, "GenerationReply": _REPLY, "Error": _ERROR}

    def reply(description: str, name: str | None = None, kind: str = "application/json") -> dict[str, Any]:
        content = {"type": "object"} if name is None else {"$ref": f"#/components/schemas/{name}"}
        return {"description": description, "content": {kind: {"schema": content}}}

    def text(description: str) -> dict[str, Any]:
        return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}

    refusals = {status: reply(why, "Error") for status, why in _REFUSALS.items()}
    shut = {status: refusals[status] for status in ("401", "403")}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/GenerationRequest"}}}}
    paths: dict[str, Any] = {
        "/v1/actions/generations": {
            "post": {
                "summary": "One action chunk for one observation; also as application/msgpack.",
                "requestBody": {"required": True, **body},
                "responses": {"200": reply("the actions", "GenerationReply"), **refusals},
            }
        },
        "/v1/actions/metadata": {"get": {"summary": "The policy.", "responses": {"200": reply("metadata"), **shut}}},
        "/v1/models": {"get": {"summary": "Served names.", "responses": {"200": reply("the list"), **shut}}},
        "/metrics": {"get": {"summary": "Prometheus.", "responses": {"200": text("metrics"), **shut}}},
        "/openapi.json": {"get": {"summary": "This document.", "responses": {"200": reply("it"), **shut}}},
        "/liveness": {"get": {"summary": "The process lives.", "responses": {"200": text("OK")}, "security": []}},
    }
    for path in ("/health", "/healthz"):
        paths[path] = {
            "get": {
                "summary": "Ready for requests.",
                "responses": {"200": text("OK"), "503": text("why not"), **shut},
            }
        }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pi05_ros", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if asks_for_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document
