"""A server on asyncio's streams, alone or with an engine process.

GET /FAULT?N         the event loop's thread suffers the fault (see faults.py);
                     sleep is a timer, block a sleep that blocks the loop
GET /thread/FAULT?N  a thread of the loop's pool does
GET /engine/FAULT?N  the engine does (engine.py, on a Unix socket), before the
                     second of the tokens that it streams
GET /big?KIB         answers with so many KiB

But for the engine's, the header Fault-Nanoseconds tells how long the fault took.

usage: asyncio_server.py PORT FILE WEIGHTS [engine]
It prints "ready PID [ENGINE-PID]".
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

import faults

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nFault-Nanoseconds: %d\r\nContent-Length: %d\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Engine:
    """The API's side of the engine's socket: one for all requests."""

    def __init__(self):
        self.waiting = {}
        self.number = itertools.count()

    async def connect(self, path):
        reader, self.writer = await asyncio.open_unix_connection(path)
        self.listener = asyncio.create_task(self.listen(reader))

    async def listen(self, reader):
        while line := await reader.readline():
            token = json.loads(line)
            self.waiting[token["id"]].put_nowait(token)
        os._exit(1)  # the engine has ended

    async def generate(self, name, number):
        key = next(self.number)
        queue = self.waiting[key] = asyncio.Queue()
        self.writer.write(json.dumps({"id": key, "fault": name, "n": number}).encode() + b"\n")
        while True:
            token = await queue.get()
            yield token["text"]
            if token["last"]:
                del self.waiting[key]
                return


engine = Engine()


async def answer(writer, target):
    path, _, query = target.partition("?")
    *where, name = path.strip("/").split("/")
    body, begin = b"ok", time.monotonic_ns()
    if where == ["engine"]:
        head = STREAM
        async for text in engine.generate(name, int(query or 0)):
            data = f"data: {text}\n\n".encode()
            writer.write(head + b"%x\r\n%s\r\n" % (len(data), data))
            head = b""
        writer.write(b"0\r\n\r\n")
        return
    if name == "big":
        body = bytes(int(query) << 10)
    elif name == "sleep" and not where:
        await asyncio.sleep(int(query) / 1000)
    else:
        fault, number = faults.parse("sleep" if name == "block" else name, query)
        if where == ["thread"]:
            await asyncio.to_thread(fault, number)
        else:
            fault(number)
    writer.write((HEAD % (time.monotonic_ns() - begin, len(body))).encode() + body)


async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await answer(writer, head.split(b" ", 2)[1].decode())
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main(port, file, weights, mode=""):
    faults.setup(file, weights)
    pids = [os.getpid()]
    if mode == "engine":
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "engine")
            child = subprocess.Popen(
                [sys.executable, os.path.join(os.path.dirname(__file__), "engine.py"), path, file, weights],
                stdout=subprocess.PIPE,
            )
            child.stdout.readline()
            pids.append(child.pid)
            await engine.connect(path)
    server = await asyncio.start_server(serve, "127.0.0.1", int(port))
    print("ready", *pids, flush=True)
    async with server:
        await server.serve_forever()


asyncio.run(main(*sys.argv[1:]))
