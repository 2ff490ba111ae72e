"""A child process that carries out requests which may crash or hang, and stays for the next one.

Imports of the libraries take longer than many a request, so the process stays. After a crash or a timeout, the next
request starts a new one. Requests and replies are lines of JSON. A request may begin early, and its reply wait. Several
threads may use a worker; one that waits in ``ask`` holds up the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from quantizer.errors import EngineError
from quantizer.utils.child_process import child_environment, python_command

_CHUNK, _REST_S = 2**16, 10.0
"""Bytes of a read, and seconds for the rest of a line whose first bytes are there."""

_OF_TORCH = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
"""Variables that torch sets when it is first used. A new process would import its libraries again, in seconds."""


class Worker:
    """One child process, which runs ``serve`` of a module; use it in a ``with`` block, or call ``close``."""

    def __init__(self, module: str) -> None:
        """Prepare a worker without starting its process.

        Args:
            module: the module that the process runs with ``python -m``; it calls ``serve``.
        """
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._errors: IO[bytes] | None = None
        self._begun: dict[str, Any] = {}
        self._replies: dict[str, Any] = {}
        self._received = b""
        self._lock = threading.RLock()

    def tell(self, request: Any) -> None:
        """Send a request that has no reply, such as an import; return at once.

        Raises:
            OSError: the process cannot start.
        """
        with self._lock:
            self._send({"request": request, "replies": False})

    def begin(self, name: str, request: Any) -> None:
        """Send a request whose reply a later ``ask`` with the same name returns; return at once.

        The process carries out requests in the order of their arrival. If it cannot start, ``ask`` says so.
        """
        with self._lock:
            with suppress(OSError):
                self._send({"request": request, "replies": True})
            self._begun[name] = request

    def ask(self, name: str, request: Any, *, doing: str, timeout_s: float) -> Any:
        """Send a request, unless ``begin`` has sent it, and return its reply.

        Args:
            name: identifies the request.
            request: a value for JSON.
            doing: the request in words, for messages.
            timeout_s: time limit in seconds.

        Raises:
            EngineError: the request failed, took too long, or crashed the process.
        """
        with self._lock:
            if name not in self._begun and name not in self._replies:
                self.begin(name, request)
            while name not in self._replies:
                self._receive(timeout_s)
            answer = self._replies.pop(name)
        if "error" in answer:
            raise EngineError(f"{doing} {answer['error']}")
        return answer["result"]

    def has_replied(self, name: str, seconds: float) -> bool:
        """Return whether the reply to a begun request is there; wait for it at most these seconds."""
        with self._lock:
            process, has_line = self._process, b"\n" in self._received
            if process is None or name not in self._begun:
                return name in self._replies
        assert process.stdout is not None
        if has_line or select.select([process.stdout], [], [], seconds)[0]:
            with self._lock:
                if process is self._process and name in self._begun:
                    self._receive(_REST_S)
        return name in self._replies

    def finish(self, timeout_s: float) -> None:
        """Wait for the replies to all requests, for example before a measurement of times."""
        with self._lock:
            while self._begun:
                self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> None:
        """Wait for the reply to the oldest request; after a crash or a timeout, send the later ones again."""
        name = next(iter(self._begun))
        try:
            if (process := self._process) is None:
                process = self._send({"request": self._begun[name], "replies": True})
            reply = self._line(process, timeout_s)
            answer = json.loads(reply) if reply else {"error": self._end(process)}
        except TimeoutError:
            answer = {"error": f"took more than {timeout_s:g} s"}
            self._stop()
        except OSError as error:
            answer = {"error": f"failed: its process cannot start ({error.strerror or error})"}
            self._stop()
        except BaseException:
            # After an interrupt the process may be in the middle of a request.
            self.close()
            raise
        del self._begun[name]
        self._replies[name] = answer
        if self._process is None:
            later, self._begun = self._begun, {}
            for name, request in later.items():
                self.begin(name, request)

    def close(self) -> None:
        """End the process, whatever it does, and forget all requests; do nothing without a process."""
        with self._lock:
            self._stop()
            self._begun, self._replies = {}, {}

    def _stop(self) -> None:
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        self._received = b""
        if process is not None:
            process.kill()
            process.wait()
        for stream in (errors, *(() if process is None else (process.stdin, process.stdout))):
            if stream is not None:
                # Unsent bytes for an ended process cannot be written.
                with suppress(OSError):
                    stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: Any) -> subprocess.Popen[bytes]:
        """Send a line to the process, and return the process; start one if there is none for this environment."""
        process, variables = self._process, child_environment()
        environment = {name: value for name, value in variables.items() if name not in _OF_TORCH}
        # While replies are due, ``_receive`` notices that the process has ended, and names the request that ended it.
        is_due = process is not None and self._begun
        if process is None or not (is_due or (process.poll() is None and environment == self._environment)):
            self._stop()
            # Closed with the process. A pipe that nobody reads could fill up.
            self._environment, self._errors = environment, tempfile.TemporaryFile()  # noqa: SIM115
            process = self._process = subprocess.Popen(
                python_command(self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=variables,
            )
        assert process.stdin is not None
        # A process that has ended is noticed when its reply is read.
        with suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps(message)}\n".encode())
            process.stdin.flush()
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Return how a process has ended, in words, and forget the process."""
        code = process.wait()
        assert self._errors is not None
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace").strip().splitlines()
        self._stop()
        if code < 0:
            return f"crashed: {signal.strsignal(-code)} (signal {-code})"
        return f"failed: {printed[-1] if printed else f'exit status {code}'}"

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        """Return the next line of a process; empty at its end. Raise ``TimeoutError`` if it takes too long."""
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            chunk = os.read(descriptor, _CHUNK)
            if not chunk:
                return b""
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line


def serve(carry_out: Callable[[Any], Any], failures: tuple[type[BaseException], ...]) -> None:
    """Carry out the requests of a ``Worker`` until it closes; call it in the module that the worker names.

    Args:
        carry_out: takes a request and returns a value for JSON.
        failures: errors that only this request has; any other ends the process with its traceback.
    """
    # Libraries print to stdout, which is for replies.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            message = json.loads(line)
            try:
                answer = {"result": carry_out(message["request"])}
            except failures as error:
                answer = {"error": f"failed: {' '.join(str(error).split())}"}
            if message["replies"]:
                replies.write(f"{json.dumps(answer)}\n")
                replies.flush()
