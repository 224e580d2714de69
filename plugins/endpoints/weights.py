"""Loads other weights into a running server. On the admin listener only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import Field

from frame.interfaces import BoundedModel, Endpoint, RequestError
from frame.quoting import quoted

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
        """The route."""
        router = APIRouter()
        router.add_api_route("/update_weights", self._update, methods=["POST"])
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
            raise RequestError(403, f"model must lie under --weights-root, got {quoted(model)}", param="model")
        return str(folder)

    async def _pause(self, mode: str) -> None:
        running = await self._control("pause", mode=mode)
        while mode == "wait" and running:
            await asyncio.sleep(_POLL_SECONDS)
            running = await self._control("pause", mode=mode)

    async def _control(self, method: str, **arguments: Any) -> Any:
        return await self.serving.engine.control(method, arguments)
