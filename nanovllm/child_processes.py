"""Child processes (ranks and replicas): how they start, communicate and end.

A process and its parent share a pair of connected sockets. The pair has no name, so no other process can write to it.
If a process ends, for any reason, its socket closes. So each process notices when the other one is gone.
"""

import contextlib
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError}
Loads = Callable[[bytes | bytearray], Any]


def _to_json(message: Any) -> bytes:
    return json.dumps(message).encode()


def frame(message: Any, dumps: Callable[[Any], bytes] = _to_json) -> bytes:
    """A message as it goes through a socket: its length in 4 bytes, then its bytes."""
    data = dumps(message)
    return len(data).to_bytes(4, "little") + data


def messages(sock: socket.socket, parent: int | None = None, loads: Loads = json.loads) -> Iterator[Any]:
    """The messages from a socket, until its other end is closed or the `parent` of this process is gone."""
    received = bytearray()
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    while True:
        while len(received) >= 4 and len(received) >= 4 + (size := int.from_bytes(received[:4], "little")):
            yield loads(received[4 : 4 + size])
            del received[: 4 + size]
        while not readable.poll(1000):
            if parent is not None and os.getppid() != parent:
                return
        try:
            data = sock.recv(1 << 20)
        except OSError:  # the process at the other end died with bytes unread
            return
        if not data:
            return
        received += data


# The parent's side


@dataclass
class Child:
    """A process that works for this one."""

    name: str
    process: subprocess.Popen
    socket: socket.socket

    def death(self) -> str:
        """Says how the process ended. Call it once its socket is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"
        return f"{self.name} {how}"


def start_child(
    name: str, module: str, defaults: Mapping[str, str], settings: Mapping[str, str] | None = None, *paths: str
) -> Child:
    """Starts a process that runs a module, whose main function is `serve`.

    Args:
        name: for error messages.
        defaults: environment variables to set if this process does not have them.
        settings: environment variables to set in any case.
        paths: directories that the child removes if this process is gone, which a signal such as SIGTERM may end at
            once.
    """
    ours, theirs = socket.socketpair()
    # The child imports from the same places, and not from the working directory. PYTHONPATH is not used for this,
    # because it would come before the standard library. The child gets this very package, not another one of the same
    # name.
    path = [entry for entry in sys.path if isinstance(entry, str) and entry]
    package = Path(__file__).parent
    # A batch system sends SIGTERM to all processes of a job. The child ends when its parent does, and cleans up then.
    program = f"""import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = {path!r}
import importlib.util, runpy
spec = importlib.util.spec_from_file_location(
    "nanovllm", {str(package / "__init__.py")!r}, submodule_search_locations=[{str(package)!r}]
)
sys.modules["nanovllm"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["nanovllm"])
runpy.run_module({module!r}, run_name="__main__")"""
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid()), *paths],
            pass_fds=[theirs.fileno()],
            env={**defaults, **os.environ, **(settings or {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C interrupts only this process
        )
    return Child(name, process, ours)


def start_reader(child: Child, hear: Callable[[Any], None], loads: Loads = json.loads) -> None:
    """Calls `hear` with each message of a child, and with None at its end, in a thread that no signal interrupts."""

    def read() -> None:
        try:
            for message in messages(child.socket, loads=loads):
                hear(message)
        finally:
            hear(None)
            child.socket.close()

    threading.Thread(target=read, daemon=True).start()


def start_writer(children: list[Child], outbox: "SimpleQueue[bytes | None]") -> None:
    """Writes the outbox to all of the children, in a thread, until None is put into it."""
    sockets = [child.socket for child in children]

    def write() -> None:
        for data in iter(outbox.get, None):
            for sock in sockets:
                with contextlib.suppress(OSError):  # the reader notices it
                    sock.sendall(data)

    threading.Thread(target=write, daemon=True).start()


def end_children(children: list[Child], outboxes: "list[SimpleQueue[bytes | None]]", parent: int, *paths: str) -> None:
    """Kills the children, and removes their directories; in a fork of the parent it does nothing."""
    if os.getpid() != parent:
        return
    for outbox in outboxes:
        outbox.put(None)
    for child in children:
        child.process.kill()
    for child in children:
        child.process.wait()
        # The reader closes the socket. If it were closed here, another file might get its number while the reader still
        # uses it.
        with contextlib.suppress(OSError):
            child.socket.shutdown(socket.SHUT_RDWR)
    remove(paths)


def remove(paths: Iterable[str]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


# The child's side


def serve(
    run: "Callable[[SimpleQueue[Any], Callable[[Any], None]], None]",
    loads: Loads = json.loads,
    dumps: Callable[[Any], bytes] = _to_json,
) -> None:
    """Serves the parent at the other end of the socket whose number is the first argument; see `start_child`.

    Args:
        run: is called with the queue of the parent's messages and a function that sends an answer. If it raises an
            exception, the parent is told.
    """
    sock, parent, paths = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    inbox: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            for message in messages(sock, parent, loads):
                inbox.put(message)
        finally:
            remove(paths)
            os._exit(1)  # the parent is gone, and the main thread may be stuck

    def reply(message: Any) -> None:
        sock.sendall(frame(message, dumps))

    threading.Thread(target=read, daemon=True).start()
    try:
        run(inbox, reply)
    except BaseException as error:
        logger.debug("the process's error", exc_info=True)
        with contextlib.suppress(OSError):
            reply({"error": type(error).__name__, "message": str(error)})
        while True:  # the parent decides whose fault it was, and ends its children
            inbox.get()
