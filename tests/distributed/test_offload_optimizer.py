"""Optimizer state in host memory or on disk: the same bits as on the device, whatever else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import utils
from shardwise.errors import OptimizerError, ShardwiseError, UsageError
from shardwise.tiers import StorageError
from tests.distributed.checkpoint_support import BATCH, build_rich, open_engine, same, state_of, train_on
from tests.distributed.scenario_support import settings
from tests.harness import ranks

PAGE = 1 << 16  # the smallest buffer: several pages for the wide model, one for the rich one


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder), "buffer_size": PAGE, **more}}


IN_MEMORY = {"offload_optimizer": {"device": "cpu", "buffer_size": PAGE}}


def driver_of(engine: Any) -> Any:
    return engine._trainer.parts.step_path.driver


@ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(stage, precision, marks=() if (stage, precision) in ((3, "fp32"), (1, "bf16")) else pytest.mark.slow)
        for stage in (1, 2, 3)
        for precision in ("fp32", "bf16", "fp16")
    ],
)
def test_every_stage_precision_and_tier_gives_the_same_bits(stage: int, precision: str, tmp_path: Path) -> None:
    for accumulation in (1, 3):
        states = []
        for zero in ({}, IN_MEMORY, on_disk(tmp_path), on_disk(tmp_path, ratio=0.5)):
            with open_engine(stage, precision, accumulation=accumulation, zero=zero) as engine:
                train_on(engine, 3 * accumulation)
                states.append(state_of(engine))
        for state in states[1:]:
            same(state, states[0])
    assert not list(tmp_path.iterdir())  # nameless files: nothing to leave behind


def without_buffers(state: dict[str, Any]) -> dict[str, Any]:
    """The forwards of a step that is skipped are counted all the same."""
    return {name: value for name, value in state.items() if not name.startswith("buffer")}


@ranks(2)
def test_a_skipped_step_leaves_the_state(tmp_path: Path) -> None:
    states = []
    for zero in ({}, on_disk(tmp_path)):
        with open_engine(3, "bf16", zero=zero) as engine:
            train_on(engine, 2)
            before = without_buffers(state_of(engine))
            loss = engine(torch.zeros(BATCH // 2, 4, dtype=torch.int64)).sum() * (float("inf") if dist.get_rank() else 1.0)
            engine.backward(loss)
            engine.step()
            assert not engine.was_step_applied()
            after = without_buffers(state_of(engine))
            assert after.pop("counters") != before.pop("counters")
            same(after, before)
            train_on(engine, 2, first=2)
            states.append(state_of(engine))
    same(*states)


@ranks(2)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_checkpoints_move_between_tiers(precision: str, tmp_path: Path) -> None:
    tiers = [{}, IN_MEMORY, on_disk(tmp_path / "swap")]
    with open_engine(3, precision) as engine:
        train_on(engine, 4)
        expected = state_of(engine)
    for number, saving in enumerate(tiers):
        with open_engine(2, precision, zero=saving) as engine:
            train_on(engine, 2)
            engine.save_checkpoint(tmp_path / str(number))
        for loading in tiers:
            with open_engine(3, precision, zero=loading) as engine:
                train_on(engine, 1, first=9)
                engine.load_checkpoint(tmp_path / str(number))
                train_on(engine, 2, first=2)
                same(state_of(engine), expected)


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_and_state_can_be_read_and_set(precision: str, tmp_path: Path) -> None:
    with open_engine(3, precision, zero=on_disk(tmp_path)) as engine:
        train_on(engine, 1)
        weight = engine.module.blocks[0][0].weight
        value = torch.arange(25.0).view(5, 5) + 0.001
        utils.safe_set_full_fp32_param(weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
        utils.safe_set_full_optimizer_state(weight, value + 1, "exp_avg")
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), value + 1)
        moment = utils.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        with shardwise.zero.GatheredParameters(weight, modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data[0, 0] = 7.0
        assert utils.safe_get_full_fp32_param(weight)[0, 0] == 7.0
        assert torch.equal(utils.safe_get_full_fp32_param(weight)[1:], value[1:])  # with all their digits
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg_sq"), moment)
        train_on(engine, 1, first=1)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def step_wide(engine: Any, number: int) -> None:
    source = torch.Generator().manual_seed(number)
    engine.backward(engine(torch.randn(2, 256, generator=source)).square().mean())
    engine.step()


@ranks(2)
@pytest.mark.parametrize(
    "kind", ["AdamW", "SGD", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Lion", "Adagrad"))]
)
def test_memory_is_a_stated_number_of_buffers(kind: str, tmp_path: Path) -> None:
    """And bytes read and written are those of the state, once per step."""

    def start(zero: dict[str, Any]) -> Any:
        torch.manual_seed(3)
        momentum = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = {"type": kind, "params": {"lr": 1e-3, **momentum}}
        config = settings(2, optimizer=optimizer, bf16={"enabled": True}, zero=zero)
        return shardwise.initialize(model=Wide(), config=config)[0]

    def cast(engine: Any) -> dict[str, torch.Tensor]:
        return {name: utils.safe_get_full_fp32_param(value) for name, value in engine.module.named_parameters()}

    def run(engine: Any, number: int) -> None:
        source = torch.Generator().manual_seed(number)
        engine.backward(engine(torch.randn(2, 256, generator=source).bfloat16()).float().square().mean())
        engine.step()

    with start({}) as engine:
        for number in range(3):
            run(engine, number)
        expected = cast(engine)
        before = engine.memory_report()
    with start(on_disk(tmp_path)) as engine:
        report = engine.memory_report()
        assert report["optimizer"] == 0
        for number in range(3):
            first = driver_of(engine).tier.stats()
            run(engine, number)
        last = driver_of(engine).tier.stats()
        state = engine.memory_report()["optimizer_offloaded"]
        assert before["optimizer"] <= state <= before["optimizer"] * 1.1
        assert engine.memory_report()["unsharded_optimizer"] == before["unsharded_optimizer"]
        moved = last.bytes_read - first.bytes_read
        assert moved == last.bytes_written - first.bytes_written
        assert state <= moved <= state + 4096 * 200  # whole blocks of the disk
        assert last.peak_buffers <= 4
        actual = cast(engine)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


@ranks(1)
def test_what_cannot_be_offloaded_is_refused(tmp_path: Path) -> None:
    model = build_rich()
    for kind in (torch.optim.NAdam, torch.optim.RMSprop):
        with pytest.raises(OptimizerError, match=f"the state of {kind.__name__} cannot be offloaded: expected Adam, AdamW"):
            shardwise.initialize(model=torch.nn.Linear(3, 3), optimizer=kind, config=settings(2, zero=on_disk(tmp_path)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardwiseError, match=r"file"):
        open_engine(2, model=model, zero=on_disk(tmp_path / "file" / "swap"))
    with open_engine(2, model=model, zero=on_disk(tmp_path)) as engine:  # the model is as it was
        train_on(engine, 1)
        engine.optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(UsageError, match="cannot change while it is offloaded: expected state exp_avg, exp_avg_sq, found"):
            train_on(engine, 1)


@ranks(1)
def test_a_step_that_the_disk_interrupts_ends_training_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    with open_engine(2, zero=on_disk(tmp_path / "swap")) as engine:
        train_on(engine, 1)
        engine.save_checkpoint(tmp_path / "run")
        saved = state_of(engine)
        tier = driver_of(engine).tier
        streams = tier.stream

        def breaks(*args: Any, **kwargs: Any) -> Any:
            yield from list(streams(*args, **kwargs))[:0]
            raise StorageError("the disk is gone.")

        tier.stream = breaks
        with pytest.raises(StorageError, match="the disk is gone"):
            train_on(engine, 1, first=1)
        del tier.stream
        for call in (lambda: train_on(engine, 1, first=1), lambda: engine.save_checkpoint(tmp_path / "run")):
            with pytest.raises(UsageError, match=r"no valid weights: found a step was interrupted.*the disk is gone"):
                call()
        engine.load_checkpoint(tmp_path / "run")
        same(state_of(engine), saved)
        train_on(engine, 1, first=1)


@ranks(2)
def test_nothing_is_open_after_the_end(tmp_path: Path) -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with open_engine(3, zero=on_disk(tmp_path)) as engine:
        train_on(engine, 1)
        state_of(engine)
    counts = []
    for _ in range(3):
        with open_engine(3, zero=on_disk(tmp_path)) as engine:
            train_on(engine, 1)
        counts.append(files())
    assert counts[0] == counts[-1]
