"""``py:module:Class``: the user's own adapter, found from rootdir.

The class takes no argument, or one keyword ``settings`` (`pytest_adapt.target.registry.TargetSettings`).
What it raises becomes a TargetError that ends with the innermost frames; what it answers is checked.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_adapt.target.checked import checked_info, checked_responses
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, TargetError
from pytest_adapt.watchdog import THREAD

if TYPE_CHECKING:
    from pytest_adapt.target.registry import TargetSettings

__all__ = ["PyTarget"]

_FRAMES = 3
_OPTIONAL = ("tokenize", "detokenize", "stats", "control", "profile", "peak_memory", "run_op")


class PyTarget:
    """Adapter around the user's class; optional methods pass through where the class has them."""

    def __init__(self, argument: str, settings: TargetSettings) -> None:
        module, _, name = argument.partition(":")
        self._who = f"target py:{argument}"
        adapter: Callable[..., Any] = getattr(importlib.import_module(module), name)
        _guard_exit()
        wants = "settings" in inspect.signature(adapter).parameters
        try:
            self._target: Any = adapter(settings=settings) if wants else adapter()
        except BaseException as error:  # the user's code may raise anything
            self._refuse("its constructor", error)

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            return getattr(self._target, name)
        raise AttributeError(name)

    def open(self, deployment: Deployment) -> Info:
        try:
            info = self._target.open(deployment)
        except BaseException as error:  # the user's code may raise anything
            self._refuse("open", error)
        if not isinstance(info, Info):
            raise TargetError(
                f"{self._who}: open returned {type(info).__name__}, expected pytest_adapt.target.protocol.Info"
            )
        return checked_info(self._who, info)

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        asked = list(requests)
        yield from checked_responses(self._who, self._answers(asked), asked)

    def close(self) -> None:
        try:
            self._target.close()
        except BaseException as error:  # the user's code may raise anything
            self._refuse("close", error)

    def _answers(self, requests: list[Request]) -> Iterator[object]:
        try:
            yield from self._target.run(requests)
        except GeneratorExit:  # the judge wants no more of it
            raise
        except BaseException as error:  # the user's code may raise anything
            self._refuse("run", error)

    def _refuse(self, where: str, error: BaseException) -> NoReturn:
        if isinstance(error, TargetError):
            raise error
        frames = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-_FRAMES:])).rstrip()
        raise TargetError(f"{self._who}: {where} raised {type(error).__name__}: {error}\n{frames}") from error


def _guard_exit() -> None:
    """Adapters run in the judge's own process: one that ended it with os._exit(0) would leave a green exit code and no
    verdict. Only the thread that judges targets is kept from it; children that it forks are not."""
    if hasattr(os._exit, "adapt_guard"):
        return
    owner, leave = os.getpid(), os._exit

    def guarded(status: int) -> NoReturn:
        if os.getpid() == owner and threading.current_thread().name == THREAD:
            raise SystemExit(f"os._exit({status})")
        leave(status)

    guarded.adapt_guard = True  # type: ignore[attr-defined]
    os._exit = guarded
