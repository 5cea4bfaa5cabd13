"""The faults of the Python servers. Each blocks the thread that calls it."""

import fcntl
import gc
import mmap
import os
import re
import threading
import time

MADV_RANDOM, MADV_NOHUGEPAGE = 1, 15

_file = _weights = _text = None
_words = re.compile(r"\w+|[^\w\s]+|\s+")
_vocabulary = {}


def setup(file, weights):
    """Maps the weights; file is for read and lock."""
    global _file, _weights, _text, _garbage
    _file = file
    with open(weights, "rb") as f:
        _weights = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    _weights.madvise(MADV_RANDOM)
    _text = "the quick brown fox, who jumps over 13 lazy dogs; " * 20
    # what a collection has to look through
    _garbage = [[i] for i in range(100_000)]


def _beside(act):
    """Runs act in a thread and returns once it has called begun."""
    begun = threading.Event()
    thread = threading.Thread(target=act, args=(begun,))
    thread.start()
    begun.wait()
    return thread


def none(_):
    pass


def cpu(ms):
    end = time.monotonic() + ms / 1000
    while time.monotonic() < end:
        pass


def sleep(ms):
    time.sleep(ms / 1000)


def lock(ms):
    """A file lock that somebody else holds for ms."""

    def hold(begun):
        with open(_file, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            begun.set()
            time.sleep(ms / 1000)

    thread = _beside(hold)
    with open(_file, "rb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
    thread.join()


def mutex(ms):
    """The interpreter's own kind of lock, which is a semaphore to the kernel."""
    held = threading.Lock()

    def hold(begun):
        with held:
            begun.set()
            time.sleep(ms / 1000)

    thread = _beside(hold)
    with held:
        pass
    thread.join()


def pipe(ms):
    """Writes to a full pipe that is emptied after ms."""
    out, into = os.pipe()
    os.write(into, bytes(1 << 16))

    def drain(begun):
        begun.set()
        time.sleep(ms / 1000)
        os.read(out, 1 << 16)

    thread = _beside(drain)
    os.write(into, b"x")
    thread.join()
    os.close(out)
    os.close(into)


def read(mib):
    """Reads the file, buffered by the kernel only."""
    buffer = bytearray(1 << 20)
    with open(_file, "rb", buffering=0) as f:
        for _ in range(mib):
            f.readinto(buffer)


def map(pages):
    """Touches pages of the mapped weights, one here, one there."""
    last = len(_weights) // 4096
    at = 0
    for _ in range(pages):
        _weights[at * 4096]
        at = (at + 7919) % last


def touch(mib):
    """Touches fresh memory, in small pages."""
    with mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE) as m:
        m.madvise(MADV_NOHUGEPAGE)
        for at in range(0, mib << 20, 4096):
            m[at] = 1


def collect(ms):
    """Garbage collections, one after the other."""
    end = time.monotonic() + ms / 1000
    while time.monotonic() < end:
        gc.collect()


def tokenise(ms):
    """Cuts a long prompt into tokens, piece by piece."""
    end = time.monotonic() + ms / 1000
    while time.monotonic() < end:
        for word in _words.findall(_text):
            _vocabulary.setdefault(word, len(_vocabulary))


ALL = {f.__name__: f for f in (none, cpu, sleep, lock, mutex, pipe, read, map, touch, collect, tokenise)}


def parse(name, query):
    """The fault of a path's last part and its number."""
    return ALL.get(name, none), int(query or 0)
