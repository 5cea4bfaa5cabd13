"""A Starlette application for uvicorn, with the paths of asyncio_server.py but
for the engine's.

usage: TRUTHLAB_FILE=FILE TRUTHLAB_WEIGHTS=WEIGHTS python3 -m uvicorn uvicorn_app:app
"""

import asyncio
import os
import time

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import faults

faults.setup(os.environ["TRUTHLAB_FILE"], os.environ["TRUTHLAB_WEIGHTS"])


def answer(begin):
    return PlainTextResponse("ok", headers={"Fault-Nanoseconds": str(time.monotonic_ns() - begin)})


async def here(request):
    begin = time.monotonic_ns()
    name, query = request.path_params["fault"], request.url.query
    if name == "sleep":
        await asyncio.sleep(int(query) / 1000)
    else:
        fault, number = faults.parse("sleep" if name == "block" else name, query)
        fault(number)
    return answer(begin)


async def in_thread(request):
    begin = time.monotonic_ns()
    fault, number = faults.parse(request.path_params["fault"], request.url.query)
    await run_in_threadpool(fault, number)
    return answer(begin)


async def big(request):
    return PlainTextResponse("x" * (int(request.url.query) << 10))


async def batched(request):
    """Three tokens, and then a timer's worth of them at once."""

    async def tokens():
        for _ in range(3):
            yield "data: token\n\n"
        await asyncio.sleep(int(request.url.query) / 1000)
        yield "data: token\n\n"

    return StreamingResponse(tokens(), media_type="text/event-stream")


app = Starlette(
    routes=[
        Route("/big", big),
        Route("/batched", batched),
        Route("/thread/{fault}", in_thread),
        Route("/{fault:path}", here),
    ]
)
