"""The engine process of asyncio_server.py: one thread that makes a token for
each request in turn, and suffers the faults of faults.py.

usage: engine.py SOCKET FILE WEIGHTS
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import sys

import faults

TOKENS = 4


def main(path, file, weights):
    # ends with the API process
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faults.setup(file, weights)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        print("ready", flush=True)
        api, _ = listener.accept()
    selector = selectors.DefaultSelector()
    selector.register(api, selectors.EVENT_READ)
    buffer, active = b"", []
    while True:
        while selector.select(0 if active else None):
            data = api.recv(65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            active += ({**json.loads(line), "index": 0} for line in lines)
        for request in active:
            if request["index"] == 1:
                faults.ALL.get(request["fault"], faults.none)(request["n"])
            faults.cpu(0.2)
            request["index"] += 1
            last = request["index"] == TOKENS
            api.sendall(json.dumps({"id": request["id"], "text": "token", "last": last}).encode() + b"\n")
        active = [request for request in active if request["index"] < TOKENS]


main(*sys.argv[1:])
