"""`bench.compare`: what it says it would run, what it runs, and what it does when systems disagree, refuse or die."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import compare
from bench.cases import CASES, POOL, Shape, make_task
from bench.goals import GOALS, judge
from bench.results import Row, Run, read_run
from bench.systems import SYSTEMS, System, named
from bench.tables import grid, render
from bench.worker import covered

TASK = make_task("comm", world=2, precision="fp32", rounds=3)


def row(name: str, median: float, peak: int = 100_000_000, **more: Any) -> Row:
    title = next(system.title for system in SYSTEMS if system.name == name)
    return Row(name, title, steps_s=[median] * 3, backward_s=[median / 2] * 3, peak_rank=peak, **more)


def run_of(*rows: Row, **more: Any) -> Run:
    return Run(TASK, "python -m bench.compare", {"torch": "2"}, list(rows), **more)


# ---- what is asked for


def test_the_model_is_the_one_of_29_million_parameters() -> None:
    import torch
    from bench.gpt import GPT

    with torch.device("meta"):
        model = GPT(TASK.case.shape, TASK.case.tokens)
    assert sum(p.numel() for p in model.parameters()) == TASK.parameters
    assert 29e6 < TASK.parameters < 30e6
    assert Shape() == TASK.case.shape


def test_a_dry_run_lists_all_systems_and_starts_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--dry-run", "--case", "accum", "--world", "4"]) == 0
    printed = capsys.readouterr().out
    assert "4 x 1 x 64 tokens a rank and step, 4 ranks" in printed
    for system in SYSTEMS:
        [line] = [line for line in printed.splitlines() if line.split()[0] == system.name]
        assert line.endswith("4 processes" if not (system.alone or system.missing) else system.missing or "1 process")


def test_help_tells_all_cases_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compare.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(case.about in printed for case in CASES.values())
    assert all(word in printed for word in ("median", "memory, all", "messages", "shardwise-3-gloo"))


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--systems", "ddp", "fdsp"], "no system is called fdsp"), (["--world", "0"], "--world, --rounds, --steps and --layers")],
)
def test_wrong_words_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compare.main(words)
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_a_name_without_number_means_all() -> None:
    assert [system.name for system in named(["shardwise-3", "ddp"])] == ["ddp", "shardwise-3"]
    assert [system.name for system in named(["deepspeed"])] == [f"deepspeed-{n}" for n in range(4)]
    assert named(["deep"]) == []


def test_what_is_not_installed_says_how_to_get_it() -> None:
    absent = System("x", "X", replace, needs=("no_such_module", "pip install it"))
    assert absent.missing == "no_such_module is not installed: pip install it"


def test_bf16_takes_a_small_model_unless_told() -> None:
    assert make_task("comm", 2, "bf16", 1).case.shape.layers == 2
    assert make_task("comm", 2, "bf16", 1, layers=8).case.shape == Shape()


# ---- what is shown


def test_goals_are_judged_by_ratios_of_one_run() -> None:
    run = run_of(
        row("single", 0.100),
        row("ddp", 0.200),
        row("fsdp2", 0.300, peak=200_000_000),
        row("shardwise-3", 0.096, peak=70_000_000, init_s=0.7),
        import_s=0.4,
    )
    found = {verdict.what: (verdict.found, verdict.word) for verdict in judge(run)}
    assert found["shardwise-3 over single, step time"] == (pytest.approx(0.96), "missed")
    assert found["shardwise-3 over fsdp2, step time"] == (pytest.approx(0.32), "reached")
    assert found["shardwise-3 over fsdp2, peak memory of a rank"] == (pytest.approx(0.35), "reached")
    assert found["shardwise-3 over deepspeed-3, step time"] == (None, "not measured")
    assert found["from shardwise import initialize, after import torch"] == (0.4, "missed")
    assert found["shardwise-3, initialize"] == (0.7, "reached")
    names = {system.name for system in SYSTEMS}
    assert {goal.ours for goal in GOALS} | {goal.against for goal in GOALS} <= names
    assert judge(replace(run, task=replace(TASK, world=4))) == []


def test_a_system_that_did_not_run_stays_in_the_table() -> None:
    refused = Row("shardwise-3-gloo", "Shardwise stage 3 over gloo", "refused", "ConfigError: transport: not here")
    lines = render(run_of(row("single", 0.1), row("shardwise-3", 0.05), refused)).splitlines()
    assert "Shardwise stage 3 over gloo  refused: ConfigError: transport: not here" in lines
    [ratio] = [line for line in lines if line.startswith("shardwise-3, time")]
    assert ratio.split() == ["shardwise-3,", "time", "0.50"]


def test_columns_line_up() -> None:
    assert grid([["a", "long"], ["longer", "1"]]) == "a       long\nlonger     1"


def test_a_saved_run_reads_back_the_same(tmp_path: Path) -> None:
    run = run_of(row("ddp", 0.1, by_kind={"allreduce_": (1, 5)}, losses=[8.5]), reference=[8.5], tolerance=1e-4)
    run.save(tmp_path / "deeper" / "run.json")
    assert read_run(tmp_path / "deeper" / "run.json") == run
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"other\.json was not written by this version"):
        read_run(tmp_path / "other.json")


def test_losses_that_differ_are_named() -> None:
    run = run_of(row("ddp", 0.1, losses=[8.5, 8.4]), row("fsdp2", 0.1, losses=[8.5, 8.3]), reference=[8.5, 8.4], tolerance=1e-4)
    assert run.disagreements() == ["PyTorch FSDP2: loss 8.300000 at step 1, where plain PyTorch has 8.400000"]
    run.rows[0].losses = [float("nan"), 8.4]
    assert len(run.disagreements()) == 2


def test_time_under_way_counts_overlaps_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert covered([]) == 0.0


# ---- what is run: systems of one process, which start quicker


def _cheat(task: Any, model: Any) -> Any:
    """Trains less than it says."""
    trainer = named(["single"])[0].setup(task, model)
    trainer.update = lambda: None  # pyright: ignore
    return trainer


def _refuse(task: Any, model: Any) -> Any:
    from shardwise.errors import ConfigError

    raise ConfigError("not with\nthis configuration")


def _die(task: Any, model: Any) -> Any:
    print("last words", flush=True)
    os._exit(3)


@pytest.mark.slow
def test_a_run_tells_who_is_wrong_refuses_or_dies(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    honest = named(["shardwise-2"])[0]
    odd = {"cheat": _cheat, "refuse": _refuse, "die": _die}
    systems = (honest, *(System(name, name, setup, alone=True) for name, setup in odd.items()))
    monkeypatch.setattr(compare, "SYSTEMS", systems)
    monkeypatch.setattr(compare, "_import_seconds", lambda: None)
    file = tmp_path / "run.json"
    words = ["--case", "tiny", "--world", "1", "--rounds", "2", "--steps", "2", "--json", str(file)]
    assert compare.main(words) == 1
    printed = capfd.readouterr()
    good, cheat, refuse, die = read_run(file).rows
    assert (good.status, len(good.steps_s), len(good.losses)) == ("ok", 4, 5)
    assert good.init_s and good.first_step_s and good.peak_rank and good.peak_all
    assert cheat.status == "ok"
    assert "ERROR: cheat: loss" in printed.err
    assert "their times must not be compared" in printed.err
    assert (refuse.status, refuse.reason) == ("refused", "ConfigError: not with this configuration")
    assert die.status == "failed"
    assert die.reason == "rank 0 died during 'build' (exit code 3): last words"
    assert "ERROR: die failed" in printed.err
    assert json.loads(file.read_text())["rows"][0]["median_s"] == good.median_s


@pytest.mark.slow
def test_two_ranks_agree_with_plain_pytorch(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ["--case", "tiny", "--world", "2", "--rounds", "1", "--systems", "ddp", "shardwise-3", "--json", str(file)]
    assert compare.main(words) == 0, capfd.readouterr().err
    run = read_run(file)
    ddp, ours = run.rows
    assert len(run.reference) == 1 + 2 + CASES["tiny"].steps > POOL
    assert ddp.losses == pytest.approx(run.reference, rel=1e-5)
    assert ours.losses == pytest.approx(run.reference, rel=1e-5)
    assert ddp.by_kind == {"allreduce_": (1, 4 * run.task.parameters)}
    assert ours.counted_by == "its counters"
    assert ddp.carrier == "gloo"
    assert ours.carrier in ("gloo", "shared memory")
    assert ours.payload and ddp.in_flight_s
