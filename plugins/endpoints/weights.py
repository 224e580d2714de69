"""Loads other weights into a running server, and refuses adapters. On the admin listener only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import Field

from frame.interfaces import BoundedModel, Endpoint, RequestError

from .json_response import json_response

_POLL_SECONDS = 0.05


class WeightsBody(BoundedModel):
    """Which weights to load, and what happens to running requests: `keep` computes them again with the new weights."""

    model: str | None = Field(None, min_length=1, max_length=1024)
    revision: str | None = Field(None, min_length=1, max_length=256)
    load_format: str | None = Field(None, min_length=1, max_length=64)
    mode: Literal["wait", "abort", "keep"] = "wait"


class WeightsEndpoint(Endpoint):
    """`/update_weights` takes the weights of another checkpoint of the same model while the server goes on.

    A checkpoint is named by its path, which must lie under `--weights-root`.
    """

    admin: ClassVar[bool] = True

    def router(self) -> APIRouter:
        """The routes of weights and of adapters; the latter answer that there are none."""
        router = APIRouter()
        router.add_api_route("/update_weights", self._update, methods=["POST"])
        router.add_api_route("/adapters", self._adapters, methods=["GET"])
        router.add_api_route("/adapters", self._no_adapters, methods=["POST"])
        router.add_api_route("/adapters/{name}", self._no_adapters, methods=["DELETE"])
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):  # the paths that clients of vLLM use
            router.add_api_route(path, self._no_adapters, methods=["POST"])
        return router

    async def _update(self, request: Request) -> Response:
        """Answers when the new weights serve; status 409 says why the old ones still do."""
        asked = await request.body()
        body = self.serving.http.parse(request, WeightsBody) if asked else WeightsBody.model_construct()
        source = {"model": body.model, "revision": body.revision, "load_format": body.load_format}
        if body.model is not None:
            source["model"] = self._folder(body.model)
        paused_before = await self._control("is_paused")
        try:
            if not paused_before:
                await self._pause(body.mode)
            await self._control("update_weights", **source)
        finally:
            if not paused_before:
                await self._control("resume")
        return json_response({"updated": True, "model": source["model"], "revision": body.revision})

    def _folder(self, model: str) -> str:
        """The checkpoint that a request names, links resolved; refused outside the root."""
        root = self.settings.weights_root
        if root is None:
            raise RequestError(
                403,
                "no folder for other weights is set; leave model out, or start the server with --weights-root",
                param="model",
            )
        try:
            folder = (Path(root) / model).resolve()
        except (OSError, ValueError):
            raise RequestError(400, "model is not the path of a folder", param="model") from None
        if not folder.is_relative_to(Path(root).resolve()):
            raise RequestError(403, f"model must lie under --weights-root, got {model[:200]!r}", param="model")
        return str(folder)

    async def _pause(self, mode: str) -> None:
        running = await self._control("pause", mode=mode)
        while mode == "wait" and running:
            await asyncio.sleep(_POLL_SECONDS)
            running = await self._control("pause", mode=mode)

    async def _adapters(self) -> Response:
        """The adapters that are loaded: none."""
        return json_response({"object": "list", "data": []})

    async def _no_adapters(self) -> Response:
        raise RequestError(
            501,
            "adapters (LoRA) are not supported yet; merge one into the weights elsewhere and POST /update_weights",
            code="not_implemented",
        )

    async def _control(self, method: str, **arguments: Any) -> Any:
        return await self.serving.engine.control(method, arguments)
