"""Ranks compare the accelerators they compute on, before anything is built."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import assembly
from shardwise.errors import LaunchError
from tests.distributed.scenario_support import build as build_net
from tests.distributed.scenario_support import settings, sgd, start, train
from tests.harness import ranks


@ranks(2)
def test_two_ranks_on_one_accelerator_are_an_error_on_both() -> None:
    """This machine need not have any: until the comparison nothing touches the device."""
    with (
        mock.patch.object(assembly, "choose_device", lambda *_, **__: torch.device("cuda", 0)),
        mock.patch.object(assembly, "use_device", lambda _: None),
        mock.patch("shardwise.device._identity", lambda _: "the only one"),
        pytest.raises(LaunchError, match="ranks 0, 1 would compute on the same cuda device"),
    ):
        shardwise.initialize(model=nn.Linear(2, 2), optimizer=sgd, config=settings(3))
    assert dist.is_initialized()
    with start(build_net(), 3) as engine:  # nothing is left in flight
        train(engine, 1)
