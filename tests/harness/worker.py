"""What runs inside a worker process: wait for a call, run it as one rank, prove that nothing is left behind, repeat.

Owns one rank of a call. The process hosts a pytest configuration of its own, so that `assert` in test modules explains itself
there as it does in the session. Three things end a worker whatever its main thread does: the session's end of the control
pipe closing, an order through that pipe, and the time limit of a call (enforced by faulthandler, which needs no GIL).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["BODY", "Call", "Outcome", "Target", "current_filters", "main"]

BODY = "__rank_body__"
ASSERTING_MODULES = ("tests.reference", "tests.models", "tests.matrix")


@dataclass(frozen=True)
class Target:
    """A top-level function by name, as another process can find it."""

    module: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Target:
        """The name of `function`, which must be defined at the top level of a module."""
        if "<" in function.__qualname__ or "." in function.__qualname__:
            raise ValueError(f"{function.__qualname__} must be a top-level function: workers find it by name")
        return cls(function.__module__, function.__qualname__)

    def load(self) -> Callable[..., Any]:
        """The function, without the decorator that sends it to workers."""
        function = getattr(importlib.import_module(self.module), self.qualname)
        return getattr(function, BODY, function)


@dataclass(frozen=True)
class Call:
    """One rank's part of a call, as it is sent to a worker."""

    target: Target
    arguments: bytes
    rank: int
    world_size: int
    store: str
    timeout: float
    group: bool
    sys_path: list[str]
    warning_filters: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Outcome:
    """How the body ended on one rank. `at` is on the monotonic clock, which all processes of a machine share."""

    kind: str
    at: float
    title: str
    text: str = ""
    result: bytes | None = None


def main(connection: Connection, control: Connection, log: str, root: str) -> None:
    """Serve calls until the session closes the connection. Runs in the worker process."""
    os.setsid()  # an interrupt typed at the session is not for us, and the group takes our own children with it
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable(2)
    threading.Thread(target=_obey, args=(control,), name="harness-control", daemon=True).start()
    options = ["--rootdir", root, "-o", "addopts=", "--noconftest", "--capture=no", "-p", "no:cacheprovider"]
    pytest.main([*options, "-p", "no:faulthandler"], plugins=[_Host(connection)])


def current_filters() -> list[tuple[Any, ...]]:
    """The warning filters in force here, in a form that can be sent: inside a test these are pyproject's and its marks'."""
    return [
        (action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _pattern(matcher: re.Pattern[str] | str | None) -> str:
    if isinstance(matcher, str):
        return re.escape(matcher) + r"\Z"
    return matcher.pattern if matcher else ""


def _obey(control: Connection) -> None:
    try:
        control.recv_bytes()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)
    faulthandler.dump_traceback(2)
    os._exit(1)


class _Host:
    """A pytest plugin that serves calls instead of running a session."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        pytest.register_assert_rewrite(*ASSERTING_MODULES)
        gc.collect()
        gc.freeze()  # what torch is made of stays; collections between calls then cost little
        self._connection.send_bytes(b"ready")
        with contextlib.suppress(EOFError):
            while True:
                _serve(pickle.loads(self._connection.recv_bytes()), self._connection)
        return 0


def _serve(call: Call, connection: Connection) -> None:
    """Run one call: report the outcome, wait until no rank needs the group any more, then report what was left behind."""
    for path in call.sys_path:
        if path not in sys.path:
            sys.path.append(path)
    before = _state()
    with _stray_exceptions() as strays:
        with _time_limit(call.timeout):
            outcome = _run_body(call)
        connection.send_bytes(pickle.dumps(outcome))
        if outcome.kind == "passed":
            connection.recv_bytes()
        # A rank that failed leaves at once: its peers then see a closed connection instead of waiting for it.
        with _time_limit(call.timeout):
            problems = _leave_group()
            gc.collect()
            problems += _differences(before)
    connection.send_bytes(pickle.dumps(problems + strays))


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_body(call: Call) -> Outcome:
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.resetwarnings()
            for action, message, category, module, line in reversed(call.warning_filters):
                warnings.filterwarnings(action, message, category, module, line)
            function = call.target.load()
            args, kwargs = pickle.loads(call.arguments)
            torch.manual_seed(0)
            random.seed(0)
            if call.group:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(call.store, call.world_size),
                    rank=call.rank,
                    world_size=call.world_size,
                    timeout=datetime.timedelta(seconds=call.timeout),
                )
            result = pickle.dumps(function(*args, **kwargs))
    except pytest.skip.Exception as skip:
        return Outcome("skipped", time.monotonic(), "skipped", str(skip))
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest.fail are failures like any other here
        return Outcome("raised", time.monotonic(), f"raised {type(error).__name__}", _traceback(error))
    return Outcome("passed", time.monotonic(), "passed", result=result)


def _traceback(error: BaseException) -> str:
    """pytest's own rendering, without this module's frames at the top."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        info = pytest.ExceptionInfo.from_exception(error.with_traceback(frames) if frames else error)
        return str(info.getrepr(style="short", chain=True))
    except Exception:  # noqa: BLE001 - whatever goes wrong in rendering, the failure itself must be seen
        return "".join(traceback.format_exception(error))


def _leave_group() -> list[str]:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - reported as what it is
        return [f"the process group could not be destroyed: {error}"]
    return []


@contextlib.contextmanager
def _stray_exceptions() -> Iterator[list[str]]:
    """Collects exceptions that nobody could catch: in finalizers, and at the end of threads."""
    strays: list[str] = []

    def note(kind: str, details: Any) -> None:
        text = "".join(traceback.format_exception(details.exc_type, details.exc_value, details.exc_traceback))
        strays.append(f"{kind} raised:\n{text.rstrip()}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = functools.partial(note, "a finalizer")
    threading.excepthook = functools.partial(note, "a thread")
    try:
        yield strays
    finally:
        sys.unraisablehook, threading.excepthook = hooks


@dataclass
class _State:
    """What a test must leave as it found it."""

    default_dtype: Any
    default_device: Any
    grad_enabled: bool
    deterministic: bool
    torch_threads: int
    autocast: bool
    directory: str
    signal_handlers: Any
    environment: dict[str, str]
    module_hooks: dict[str, int]
    threads: list[threading.Thread]
    children: list[Any]


def _state() -> _State:
    # torch has no public way to read its global module hooks, and a hook left behind would act on every later test.
    registries = vars(torch.nn.modules.module)
    return _State(
        default_dtype=torch.get_default_dtype(),
        default_device=torch.get_default_device(),
        grad_enabled=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        torch_threads=torch.get_num_threads(),
        autocast=torch.is_autocast_enabled("cpu"),
        directory=str(Path.cwd()),
        signal_handlers=[signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        environment=dict(os.environ),
        module_hooks={name: len(hooks) for name, hooks in registries.items() if re.fullmatch(r"_global_.*hooks", name)},
        threads=[thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)],
        children=multiprocessing.active_children(),
    )


def _differences(before: _State) -> list[str]:
    for thread in _state().threads:
        if thread not in before.threads:
            thread.join(timeout=1.0)  # one that has been told to stop may need a moment
    after = _state()
    return [
        f"{field.name.replace('_', ' ')} changed: {_change(getattr(before, field.name), getattr(after, field.name))}"
        for field in dataclasses.fields(_State)
        if getattr(before, field.name) != getattr(after, field.name)
    ]


def _change(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        keys = [key for key in {*before, *after} if before.get(key) != after.get(key)]
        return ", ".join(f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in sorted(keys))
    return f"{before!r} -> {after!r}"
