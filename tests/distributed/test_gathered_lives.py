"""`GatheredParameters` around training, copies and other engines: what happens to the weights outlives or changes the block."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import utils, zero
from shardwise.errors import ParameterError, UsageError
from shardwise.zero import GatheredParameters, homes
from tests.distributed.test_gathered_edit import edited, in_place
from tests.distributed.test_gathered_read import build, gathered, released, sharded, whole
from tests.distributed.zero_support import agree, config, engine_for, same
from tests.harness import ranks

X = torch.ones(2, 4)


def train(engine: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(X).square().mean())
        engine.step()


def trained(steps: int, stage: int = 2) -> dict[str, Tensor]:
    model = build()
    with engine_for(model, stage) as engine:
        train(engine, steps)
        return dict(gathered(model))


@ranks(2)
def test_whole_steps_inside() -> None:
    """The block sees the updates, does not take them for edits, and does not undo them."""
    right = trained(2)
    for stage in (0, 1, 2, 3):
        for names in (("head.weight", "scale"), ("blocks.0.0.weight",), ()):
            for modifier in (None, 0):
                model = build()
                with engine_for(model, stage) as engine, warnings.catch_warnings():
                    warnings.simplefilter("error")
                    parameters = [model.get_parameter(name) for name in names] or list(model.parameters())
                    train(engine)
                    with GatheredParameters(parameters, modifier_rank=modifier):
                        train(engine)
                        for name, parameter in model.named_parameters():
                            if any(parameter is each for each in parameters):
                                assert torch.allclose(parameter, right[name], rtol=1e-6, atol=1e-7), (stage, name)
                    after = dict(gathered(model))
                    assert all(torch.allclose(after[n], right[n], rtol=1e-6, atol=1e-7) for n in right), (
                        stage,
                        names,
                        modifier,
                    )
                    assert agree(after.values())


@ranks(2)
def test_weights_set_inside_by_other_means() -> None:
    for stage in (0, 1, 3):
        for modifier in (None, 1):
            model = build()
            with engine_for(model, stage, "bf16"), warnings.catch_warnings():
                warnings.simplefilter("error")
                with GatheredParameters(model.parameters(), modifier_rank=modifier):
                    utils.safe_set_full_fp32_param(model.head.weight, torch.full((4, 4), 1.0 + 2.0**-12))
                    assert torch.equal(model.head.weight, torch.ones(4, 4, dtype=torch.bfloat16)), stage
                master = utils.safe_get_full_fp32_param(model.head.weight)
                assert master is not None
                assert torch.equal(master, torch.full((4, 4), 1.0 + 2.0**-12)), "digits that the weight does not hold"


@ranks(2)
def test_a_state_dict_loaded_inside() -> None:
    right = edited()
    state = {**build().state_dict(), **right}
    state["tail.weight"] = right["head.weight"]
    for stage in (0, 1, 3):
        for who in ("modifier", "everyone", "serving"):
            model = build()
            with engine_for(model, stage, "bf16") as engine:
                if who == "serving":
                    with engine.inference() as plain:
                        plain.load_state_dict(state)
                else:
                    with GatheredParameters(model.parameters(), modifier_rank=0):
                        if who == "everyone" or dist.get_rank() == 0:
                            model.load_state_dict(state)
                for name, value in gathered(model):
                    dtype = value.dtype
                    assert same(value, right[name].to(dtype)), (stage, who, name)
                for name, parameter in model.named_parameters():
                    master = utils.safe_get_full_fp32_param(parameter)
                    assert master is not None
                    assert torch.equal(master.to(parameter.dtype), right[name].to(parameter.dtype)), (stage, who, name)
                train(engine_in_bf16(engine))


def engine_in_bf16(engine: Any) -> Any:
    """The engine, fed with 16-bit inputs."""

    class Fed:
        def __call__(self, x: Tensor) -> Tensor:
            return engine(x.bfloat16()).float()

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    return Fed()


@ranks(2)
def test_in_inference_mode() -> None:
    right = edited()
    for stage in (0, 1, 3):
        model = build()
        with engine_for(model, stage) as engine:
            with torch.inference_mode():
                with GatheredParameters(model.parameters()):
                    assert whole(model, build())
                engine(X)
                with GatheredParameters(model.parameters(), modifier_rank=0):
                    if dist.get_rank() == 0:
                        model.head.weight.data = model.head.weight.data * 2.0 + 1.0
                        model.blocks[1][0].bias.data[1:3] = 7.0
                        model.scale.data.fill_(5.0)
            assert all(same(value, right[name]) for name, value in gathered(model)), stage
            train(engine)
            assert engine.was_step_applied()


# ---- copies


@ranks(2)
def test_a_copy_is_a_model_of_its_own() -> None:
    """As reference models and moving averages are made: copied from the trained one, then used, trained or sharded."""
    expected = build()
    for stage in (0, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            if stage == 3:
                with GatheredParameters(model.parameters()):
                    reference = copy.deepcopy(engine.module)
            else:
                reference = copy.deepcopy(engine.module)
            train(engine, 2)
            assert torch.equal(reference(X), expected(X))
            reference(X).sum().backward()
            assert reference.head.weight.grad is not None, "an ordinary module has ordinary gradients"
            reference.zero_grad()
            with engine_for(reference, 3) as other:
                assert torch.equal(other(X), expected(X))
                train(other, 2)
                assert all(same(one, two) for (_, one), (_, two) in zip(gathered(reference), gathered(model), strict=True))


@ranks(2)
def test_a_module_can_be_written_to_a_file_where_it_is_whole() -> None:
    for stage in (0, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            file = io.BytesIO()
            with GatheredParameters(model.parameters()):
                torch.save(model.state_dict(), file)
                torch.save(model.blocks, second := io.BytesIO())
            train(engine)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            assert all(same(state[name], value) for name, value in build().state_dict().items())
            second.seek(0)
            loaded = torch.load(second, weights_only=False)
            assert torch.equal(loaded[0](X), build().blocks[0](X))


# ---- engines that are gone


@ranks(2)
def test_the_directory_of_parameters_forgets() -> None:
    gc.collect()
    before = len(homes)
    for stage in (0, 3):
        model = sharded()
        with engine_for(model, stage) as engine:
            train(engine)
            assert len(homes) == before + len(list(model.parameters()))
        assert len(homes) == before
        model = sharded()
        del model, engine
        gc.collect()
        assert len(homes) == before


@ranks(2)
def test_weights_that_are_gone_for_good_are_told() -> None:
    model = build()
    with engine_for(model, 3) as engine:
        engine.destroy(restore=False)
    for modifier in (None, 0):
        with pytest.raises((ParameterError, UsageError), match=r"head\.weight|gone|destroyed"):  # noqa: SIM117
            with GatheredParameters(model.parameters(), modifier_rank=modifier):
                raise AssertionError("there is nothing to gather")
    with pytest.raises(ParameterError, match="has no values"):
        shardwise.initialize(model=model, config=config(3))


@ranks(2)
def test_a_context_that_outlives_its_engine() -> None:
    for stage in (1, 3):
        model, expected = build(), build()
        with GatheredParameters(model.parameters()), engine_for(model, stage) as engine:  # no engine yet: plain parameters
            pass
        assert whole(model, expected)
        engine, *_ = shardwise.initialize(model=model, config=config(stage))
        context = GatheredParameters(model.parameters())
        with context:
            engine.destroy()
        assert whole(model, expected)
        assert torch.equal(model(X), expected(X))


@ranks(2)
def test_after_an_engine_that_could_not_be_made() -> None:
    """Whatever `initialize` complains about, the model is still the user's."""

    def boom(optimizer: Any) -> Any:
        raise ZeroDivisionError

    for make in (build, sharded):
        for stage in (0, 3):
            model, expected = make(), build()
            with pytest.raises(ZeroDivisionError):
                shardwise.initialize(model=model, config=config(stage), lr_scheduler=boom)
            with engine_for(model, 3):
                assert released(model)
                with GatheredParameters(model.parameters()):
                    assert whole(model, expected)


@ranks(2)
def test_fused_optimizers_may_be_made_from_released_parameters() -> None:
    for fused in (False, True):
        with zero.Init():
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        with engine_for(model, 3, optimizer=torch.optim.AdamW(model.parameters(), fused=fused)) as engine:
            train(engine)
            assert engine.was_step_applied()


@ranks(2)
def test_edits_in_place_by_all_ranks_before_a_step_are_the_same_as_at_construction() -> None:
    model, plain = build(), build()
    in_place(plain)
    with engine_for(model, 3) as engine, engine_for(plain, 2) as other:
        with GatheredParameters(model.parameters(), modifier_rank=0):
            in_place(model)
        train(engine, 2)
        train(other, 2)
        assert all(same(one, two) for (_, one), (_, two) in zip(gathered(model), gathered(plain), strict=True))


@ranks(2)
def test_forward_and_backward_on_different_sides_of_the_block() -> None:
    right = trained(2)
    for stage in (2, 3):
        for side in ("forward", "backward", "both", "one unit"):
            model = build()
            with engine_for(model, stage) as engine:
                for _ in range(2):
                    chosen = list(model.blocks[1].parameters() if side == "one unit" else model.parameters())
                    with GatheredParameters(chosen if side != "backward" else ()):
                        loss = engine(X).square().mean()
                        if side == "both":
                            engine.backward(loss)
                    if side != "both":
                        with GatheredParameters(chosen if side == "backward" else ()):
                            engine.backward(loss)
                    engine.step()
                after = dict(gathered(model))
                assert all(same(after[name], right[name]) for name in right), (stage, side)


@ranks(2)
def test_edits_while_the_model_is_served() -> None:
    right = edited()
    expected = build()
    in_place(expected)
    for stage in (0, 1, 3):
        model = build()
        with engine_for(model, stage) as engine:
            with engine.inference() as plain:
                with GatheredParameters(model.parameters(), modifier_rank=1):
                    if dist.get_rank() == 1:
                        in_place(model)
                    with engine.inference() as inner:
                        assert inner is plain
                assert torch.equal(plain(X), expected(X)), stage
            with GatheredParameters(model.head.parameters()), engine.inference() as plain:
                assert torch.equal(plain(X), expected(X)), stage
            assert all(same(value, right[name]) for name, value in gathered(model)), stage
