"""Runs one rank's Python program and tells the launcher how it failed.

The launcher starts `python child.py script FILE ARGS...` or `child.py module NAME ARGS...`. The program sees what it
would see under plain `python FILE` or `python -m NAME`: `__main__`, `sys.argv`, `sys.path`, exit codes. An uncaught
exception is sent to the launcher over a pipe when it reaches the top, before the process has ended, so that the launcher
knows which rank failed first, can print that traceback last, and notices a rank that raises but does not end. Fatal signals
(a segmentation fault) leave the Python stack in the same pipe.

Owns that and nothing else: standard library only, nothing of Shardwise, no imports that a program without failure pays for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
from types import CodeType, ModuleType, TracebackType

__all__ = ["RECORD_MARK", "RECORD_VARIABLE", "main"]

RECORD_VARIABLE = "SHARDWISE_RECORD"
"""`FD:MODE`: the pipe to the launcher; MODE is `print` where an uncaught exception is to be printed here as well."""
RECORD_MARK = "\x1e"
"""Begins a record (one line of JSON); other bytes in the pipe come from the fault handler."""

_SENT_HEAD, _SENT_TAIL = 8_000, 24_000  # characters of a traceback that are sent; a pipe holds 64 KiB
_SEND_SECONDS = 2.0


class _Link:
    """The pipe to the launcher, or nothing when the program was started by hand."""

    def __init__(self) -> None:
        # Taken out of the environment: the pipe is this process's own, not that of programs it starts.
        number, _, mode = os.environ.pop(RECORD_VARIABLE, "").partition(":")
        self.descriptor = int(number) if number.isdigit() else None
        self.prints = mode != "quiet"
        self.told: BaseException | None = None  # what the launcher will print, so that it is not printed here as well
        self.owner = os.getpid()
        if self.descriptor is not None:
            os.set_inheritable(self.descriptor, False)
            faulthandler.enable(file=self.descriptor)

    def send(self, error: BaseException, text: str) -> bool:
        """True when the launcher has the record."""
        import json
        import time

        if self.descriptor is None or os.getpid() != self.owner:
            return False
        if len(text) > _SENT_HEAD + _SENT_TAIL:
            left_out = len(text) - _SENT_HEAD - _SENT_TAIL
            text = f"{text[:_SENT_HEAD]}\n  ... {left_out} characters left out ...\n{text[-_SENT_TAIL:]}"
        record = {"time": time.monotonic(), "type": type(error).__name__, "line": _first_line(error), "text": text}
        sent = self._write(f"{RECORD_MARK}{json.dumps(record)}\n".encode(), time.monotonic() + _SEND_SECONDS)
        if sent and not self.prints:
            self.told = error
        return sent

    def hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """`sys.excepthook` of the program: Python's own, but silent about what the launcher prints."""
        if error is not self.told:
            sys.__excepthook__(kind, error, trace)

    def _write(self, data: bytes, deadline: float) -> bool:
        import time

        assert self.descriptor is not None
        while data and time.monotonic() < deadline:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return False
        return not data


def main(argv: list[str]) -> None:
    """Run the program; on an uncaught exception report it and exit with code 1 (130 for Ctrl-C)."""
    link = _Link()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line is written when it is complete: none is lost when the rank dies, none is torn by another rank's.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    # Before the program runs: torch.distributed wraps the hook that it finds, and would print what Python's own prints.
    sys.excepthook = link.hook
    kind, target, arguments = argv[1], argv[2], argv[3:]
    try:
        if kind == "module":
            _run_module(target, arguments)
        else:
            _run_script(target, arguments)
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            link.send(stop, f"{stop.code}\n")
            if stop is link.told:
                sys.exit(1)  # what Python ends with after it has printed such a message
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends the program is what this file is for
        sys.exit(_report(link, error))


def _run_script(path: str, arguments: list[str]) -> None:
    from pathlib import Path

    sys.argv[:] = [path, *arguments]
    file = Path(path)
    if file.is_dir() or file.suffix in {".zip", ".pyz"}:
        import runpy

        del sys.path[: 0 if _safe_path() else 1]
        runpy.run_path(path, run_name="__main__")
        return
    if not _safe_path():
        sys.path[0] = str(file.resolve().parent)
    with io.open_code(str(file.absolute())) as stream:
        code = compile(stream.read(), path, "exec", dont_inherit=True)
    _execute(code, path)


def _execute(code: CodeType, path: str) -> None:
    # A new module object, in place of this one, is `__main__` to the end: pickling and spawned workers look things up there.
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    import runpy

    sys.argv[:] = [name, *arguments]
    if not _safe_path():
        sys.path[0] = str(os.getcwd())  # noqa: PTH109 - what `python -m` puts there
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))


def _report(link: _Link, error: BaseException) -> int:
    import traceback

    trace = _own_frames_removed(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    link.send(error, text)
    # A hook that the program installed (a tracker, a debugger) does its work in any case; what it wraps in the end is ours.
    with contextlib.suppress(Exception):
        sys.excepthook(type(error), error, trace)
        sys.stderr.flush()
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _first_line(error: BaseException) -> str:
    try:
        return str(error).strip().partition("\n")[0][:200]
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error itself
        return ""


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on, as plain Python would print it."""
    rest = trace
    while rest is not None and _is_own(rest.tb_frame.f_code.co_filename):
        rest = rest.tb_next
    return rest


def _is_own(file: str) -> bool:
    return file == __file__ or file in {"<frozen runpy>", "<frozen importlib._bootstrap>"} or file.endswith("/runpy.py")


if __name__ == "__main__":
    main(sys.argv)
