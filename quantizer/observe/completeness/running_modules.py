"""Followers of a pass, which are called for every module that runs in their own thread."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Follower(Protocol):
    """A listener to every module call of a thread."""

    def enter(self, module: nn.Module) -> None:
        """Record that a module begins to run."""

    def exit(self, module: nn.Module) -> None:
        """Record that a module ends, also by an exception."""


class _Threads(threading.local):
    """The followers of each thread."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []


_THREADS = _Threads()
_LOCK = threading.Lock()
_HANDLES: list[Any] = []
_FOLLOWING: list[Follower] = []


def follow(follower: Follower) -> None:
    """Call a follower for every module that this thread runs from now on, until ``leave``."""
    # Hooks on the modules would turn off the fast paths of torch, so they are torch's global hooks. There are only two
    # in the process: torch calls them in every thread, and does not expect them to change meanwhile.
    with _LOCK:
        _FOLLOWING.append(follower)
        if not _HANDLES:
            _HANDLES.extend(
                (register_module_forward_pre_hook(_enter), register_module_forward_hook(_exit, always_call=True))
            )
    _THREADS.followers.append(follower)


def leave(follower: Follower) -> None:
    """Undo ``follow``, in the same thread; do nothing if it was not called."""
    if follower in _THREADS.followers:
        _THREADS.followers.remove(follower)
    with _LOCK:
        if follower in _FOLLOWING:
            _FOLLOWING.remove(follower)
        if not _FOLLOWING:
            for handle in _HANDLES:
                handle.remove()
            _HANDLES.clear()


def _enter(module: nn.Module, args: Any) -> None:
    for follower in _THREADS.followers:
        follower.enter(module)


def _exit(module: nn.Module, args: Any, result: Any) -> None:
    for follower in reversed(_THREADS.followers):
        follower.exit(module)
