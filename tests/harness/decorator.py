"""The two ways to use the pool: the decorator of a test, and a call from inside one.

Owns how a function is named so that another process finds it, and how pytest sees the decorated test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.harness.pool import Options, the_pool
from tests.harness.report import RankReport, RanksFailed
from tests.harness.worker import BODY, Target

__all__ = ["ranks", "run_on_ranks"]


def ranks(
    *world_sizes: int, timeout: float = 60.0, disposable: bool = False, dies: Collection[int] = (), group: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a top-level test function on this many ranks; several world sizes make several tests.

    Arguments that pytest gives the test (parameters, also fixtures such as `tmp_path`) reach every rank if they can be
    pickled. A body that has a parameter `world_size` is told.

    Args:
        world_sizes: how many ranks.
        timeout: seconds after which all ranks still running are dumped and killed, and the test fails.
        disposable: throw the workers away afterwards, for tests that break the group or the process.
        dies: ranks whose process is meant to die during the test; it fails if they do not. Implies `disposable`.
        group: start a gloo process group before the body.
    """
    if not world_sizes or not all(isinstance(size, int) and size > 0 for size in world_sizes):
        raise ValueError(f"@ranks needs world sizes, as in @ranks(2) or @ranks(1, 2, 3), not {world_sizes}")
    options = Options(timeout=timeout, disposable=disposable or bool(dies), dies=frozenset(dies), group=group)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        target = Target.of(body)
        signature = inspect.signature(body)
        told = "world_size" in signature.parameters

        @functools.wraps(body)
        def run(**arguments: Any) -> None:
            __tracebackhide__ = True
            world_size = arguments["world_size"] if len(world_sizes) > 1 else world_sizes[0]
            if told:
                arguments["world_size"] = world_size
            else:
                arguments.pop("world_size", None)
            failure, reports = None, []
            try:
                reports = the_pool().run(target, world_size, (), arguments, options)
            except RanksFailed as error:
                failure = str(error)
            if failure:  # outside of the handler, so that pytest does not show the same text twice
                pytest.fail(failure, pytrace=False)
            if all(report.kind == "skipped" for report in reports):
                pytest.skip(reports[0].text)

        setattr(run, BODY, body)
        own = [each for each in signature.parameters.values() if each.name != "world_size"]
        if len(world_sizes) == 1:
            run.__signature__ = signature.replace(parameters=own)
            return run
        extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*own, extra])
        return pytest.mark.parametrize("world_size", world_sizes, ids=[f"ranks{size}" for size in world_sizes])(run)

    return decorate


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    disposable: bool = False,
    dies: Collection[int] = (),
    group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run a top-level function on `world_size` ranks and return what each returned, in rank order (None for one that dies).

    Raises:
        RanksFailed: some rank failed; the message is the same as that of a decorated test.
    """
    options = Options(timeout=timeout, disposable=disposable or bool(dies), dies=frozenset(dies), group=group)
    reports: list[RankReport] = the_pool().run(Target.of(function), world_size, args, kwargs, options)
    return [report.result for report in reports]
