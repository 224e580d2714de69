"""The operator's routes for a running server: pause, sleep, reset, profile, shut down. On the admin listener only."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import Field

from frame.interfaces import BoundedModel, Endpoint

from .json_response import json_response

_POLL_SECONDS = 0.05


class PauseBody(BoundedModel):
    """How to pause."""

    mode: str = Field("keep", max_length=16)
    clear_cache: bool = False


class ResetBody(BoundedModel):
    """What else to reset."""

    reset_running_requests: bool = False
    reset_connector: bool = False


class SleepBody(BoundedModel):
    """The sleep level: 1 keeps the weights, 2 drops them too."""

    level: int = Field(1, ge=1, le=2)


class WakeBody(BoundedModel):
    """What to allocate again."""

    tags: list[Literal["weights", "kv_cache"]] = Field(["weights", "kv_cache"], max_length=2)


class ScaleBody(BoundedModel):
    """How many engines share the experts from now on.

    vLLM lets running requests end for `drain_timeout` seconds; here they go on with the new engines.
    """

    new_data_parallel_size: int
    drain_timeout: float = Field(120, gt=0, le=1e9)


class AdminEndpoint(Endpoint):
    """Bodies are optional; every answer is JSON."""

    admin: ClassVar[bool] = True

    def router(self) -> APIRouter:
        """The admin routes: POST to change, GET to ask."""
        router = APIRouter()
        for path, handler in (
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/sleep", self._sleep),
            ("/wake_up", self._wake_up),
            ("/reset_prefix_cache", self._reset),
            ("/reset_mm_cache", self._reset_media),
            ("/reset_encoder_cache", self._reset_media),
            ("/scale_elastic_ep", self._scale),
            ("/is_scaling_elastic_ep", self._is_scaling),
            ("/start_profile", self._start_profile),
            ("/stop_profile", self._stop_profile),
            ("/shutdown", self._shutdown),
        ):
            router.add_api_route(path, handler, methods=["POST"])
        for path, question in (
            ("/is_paused", self._is_paused),
            ("/is_sleeping", self._is_sleeping),
            ("/is_scaling_elastic_ep", self._is_scaling),
        ):
            router.add_api_route(path, question, methods=["GET"])
        return router

    async def _pause(self, request: Request) -> Response:
        """Holds requests back: `keep` freezes running ones, `abort` ends them, `wait` answers when they have ended."""
        body = await self._body(request, PauseBody)
        running = await self._control("pause", mode=body.mode, clear_cache=body.clear_cache)
        while body.mode == "wait" and running:
            await asyncio.sleep(_POLL_SECONDS)
            running = await self._control("pause", mode="wait", clear_cache=body.clear_cache)
        return json_response({"is_paused": True})

    async def _resume(self) -> Response:
        await self._control("resume")
        return json_response({"is_paused": False})

    async def _is_paused(self) -> Response:
        return json_response({"is_paused": await self._control("is_paused")})

    async def _sleep(self, request: Request) -> Response:
        """Frees the KV cache and, from level 2 on, the weights. Requests wait."""
        body = await self._body(request, SleepBody)
        await self._control("sleep", keep=["weights"] if body.level == 1 else [])
        return json_response({"is_sleeping": True})

    async def _wake_up(self, request: Request) -> Response:
        body = await self._body(request, WakeBody)
        await self._control("wake_up", tags=body.tags)
        return json_response({"is_sleeping": await self._control("is_sleeping")})

    async def _is_sleeping(self) -> Response:
        return json_response({"is_sleeping": await self._control("is_sleeping")})

    async def _reset(self, request: Request) -> Response:
        """`success` is false while running requests hold blocks, unless `reset_running_requests` preempts them."""
        body = await self._body(request, ResetBody)
        return json_response({"success": await self._control("reset_prefix_cache", **body.model_dump())})

    async def _reset_media(self) -> Response:
        """Models take text only, so caches of media are always empty."""
        return json_response({"success": True})

    async def _scale(self, request: Request) -> Response:
        """Answers when the new engines serve; running requests go on with them, and new ones wait for them."""
        body: ScaleBody = self.serving.http.parse(request, ScaleBody)
        size = body.new_data_parallel_size
        changed = await self._control("scale_elastic_ep", new_data_parallel_size=size)
        done = "Scaled to" if changed else "Nothing changed: there are"
        return json_response({"message": f"{done} {size} data parallel engines", "changed": bool(changed)})

    async def _is_scaling(self) -> Response:
        return json_response({"is_scaling_elastic_ep": bool(await self._control("is_scaling_elastic_ep"))})

    async def _start_profile(self) -> Response:
        await self._control("start_profile")
        return json_response({"profiling": True})

    async def _stop_profile(self) -> Response:
        return json_response({"profiling": False, "file": await self._control("stop_profile")})

    async def _shutdown(self) -> Response:
        """Like a first SIGTERM: running requests may finish."""
        await self._control("shutdown")
        return json_response({"stopping": True})

    async def _body(self, request: Request, kind: type[BoundedModel]) -> Any:
        """The body; its defaults when there is none."""
        return self.serving.http.parse(request, kind) if await request.body() else kind.model_construct()

    async def _control(self, method: str, **arguments: Any) -> Any:
        return await self.serving.engine.control(method, arguments)
