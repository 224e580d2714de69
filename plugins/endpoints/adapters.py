"""Loads and unloads adapters while the server runs, under vLLM's paths and frame's. On the admin listener only."""

from __future__ import annotations

from typing import ClassVar

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from frame.interfaces import BoundedModel, Endpoint

from .json_response import json_response


class LoadBody(BoundedModel):
    """The name that requests will give as their model, and the adapter's folder, which lies under `--lora-root`."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=1024)
    load_inplace: bool = False


class UnloadBody(BoundedModel):
    """The name of an adapter."""

    lora_name: str = Field(min_length=1, max_length=256)


class AdaptersEndpoint(Endpoint):
    """`/v1/load_lora_adapter`, `/v1/unload_lora_adapter` and `/adapters`."""

    admin: ClassVar[bool] = True

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter()
        router.add_api_route("/adapters", self._list, methods=["GET"])
        router.add_api_route("/adapters/{name:path}", self._delete, methods=["DELETE"])
        for path in ("/adapters", "/v1/load_lora_adapter"):
            router.add_api_route(path, self._load, methods=["POST"])
        router.add_api_route("/v1/unload_lora_adapter", self._unload, methods=["POST"])
        return router

    async def _list(self) -> Response:
        """The adapters that can be used."""
        cards = await self.serving.models.adapters()
        data = [{"lora_name": card.name, "lora_path": card.path, "parent": card.parent} for card in cards]
        return json_response({"object": "list", "data": data})

    async def _load(self, request: Request) -> Response:
        """Answers when the adapter can be used; 400, 403 and 404 say what is wrong with it."""
        body = self.serving.http.parse(request, LoadBody)
        await self.serving.models.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        """No further request gets the adapter; those that run finish."""
        return await self._delete(self.serving.http.parse(request, UnloadBody).lora_name)

    async def _delete(self, name: str) -> Response:
        await self.serving.models.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
