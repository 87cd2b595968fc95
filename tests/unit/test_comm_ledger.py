"""The ledger's counters, residency and peaks."""

from __future__ import annotations

import json

import pytest

from shardwise.comm import Ledger, difference
from shardwise.errors import UsageError


def test_counts_by_kind_and_by_axis() -> None:
    ledger = Ledger()
    ledger.count("all_gather", "shard", 100)
    ledger.count("all_gather", "shard", 20)
    ledger.count("all_gather", "replicate", 3)
    ledger.count("all_reduce", "replicate", 5)
    found = ledger.snapshot()
    assert found["calls"] == {"all_gather": 3, "all_reduce": 1}
    assert found["bytes"] == {"all_gather": 123, "all_reduce": 5}
    assert found["axes"] == {"shard": {"all_gather": 120}, "replicate": {"all_gather": 3, "all_reduce": 5}}
    assert json.loads(json.dumps(found)) == found


def test_residency_and_peaks_by_category_and_in_total() -> None:
    ledger = Ledger()
    ledger.hold("parameters", 100)
    ledger.hold("gathered", 40)
    ledger.drop("gathered", 40)
    ledger.hold("gradients", 30)
    assert (ledger.resident("gathered"), ledger.peak("gathered")) == (0, 40)
    assert ledger.resident("nothing") == ledger.peak("nothing") == 0
    found = ledger.snapshot()
    assert found["resident"] == {"parameters": 100, "gathered": 0, "gradients": 30}
    assert found["peak"] == {"parameters": 100, "gathered": 40, "gradients": 30}
    assert (found["resident_total"], found["peak_total"]) == (130, 140)


def test_dropping_what_is_not_held_is_an_error() -> None:
    ledger = Ledger()
    ledger.hold("gathered", 10)
    with pytest.raises(UsageError, match="'gathered' are dropped that nobody holds: expected at most 10, found 11"):
        ledger.drop("gathered", 11)
    assert ledger.resident("gathered") == 10


def test_reset_forgets_traffic_and_keeps_what_is_held() -> None:
    ledger = Ledger()
    ledger.count("all_gather", "shard", 100)
    ledger.hold("parameters", 100)
    ledger.hold("gathered", 40)
    ledger.drop("gathered", 40)
    ledger.reset()
    found = ledger.snapshot()
    assert found["calls"] == found["bytes"] == found["axes"] == {}
    assert found["resident"] == found["peak"] == {"parameters": 100}
    assert found["resident_total"] == found["peak_total"] == 100


def test_a_snapshot_does_not_change_and_two_have_a_difference() -> None:
    ledger = Ledger()
    ledger.count("all_gather", "shard", 100)
    ledger.hold("gathered", 40)
    ledger.hold("parameters", 7)
    before = ledger.snapshot()
    ledger.count("all_gather", "shard", 10)
    ledger.count("broadcast", "shard", 1)
    ledger.drop("gathered", 15)
    after = ledger.snapshot()
    assert before["bytes"] == {"all_gather": 100}
    change = difference(before, after)
    assert change["calls"] == {"all_gather": 1, "broadcast": 1}
    assert change["bytes"] == {"all_gather": 10, "broadcast": 1}
    assert change["axes"] == {"shard": {"all_gather": 10, "broadcast": 1}}
    assert change["resident"] == {"gathered": -15}
    assert change["resident_total"] == -15
    assert (change["peak"], change["peak_total"]) == ({"gathered": 40, "parameters": 7}, 47)
    assert difference(after, after)["calls"] == {}
