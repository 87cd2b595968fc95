"""`GatheredParameters` to edit: what the named rank writes reaches every rank and the master weights, and nothing else does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import utils
from shardwise.errors import ParameterError
from shardwise.zero import DiscardedEditWarning, GatheredParameters
from tests.distributed.test_gathered_read import build, gathered, released, sharded, whole
from tests.distributed.zero_support import agree, engine_for, everywhere, same
from tests.harness import ranks
from tests.models import CASES


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2.0).add_(1.0)
        model.blocks[1][0].bias[1:3] = 7.0
        model.scale.fill_(5.0)


def through_data(model: Any) -> None:
    model.head.weight.data.copy_(model.head.weight.data * 2.0 + 1.0)
    model.blocks[1][0].bias.data[1:3].fill_(7.0)
    model.scale.data.sub_(model.scale.data).add_(5.0)


def by_assignment(model: Any) -> None:
    model.head.weight.data = (model.head.weight.data * 2.0 + 1.0).t().contiguous().t()
    bias = model.blocks[1][0].bias.detach().clone()
    bias[1:3] = 7.0
    model.blocks[1][0].bias.data = bias
    model.scale.data = torch.tensor(5.0, dtype=model.scale.dtype)


def by_initializer(model: Any) -> None:
    weight = model.head.weight.detach().clone()
    with torch.no_grad():
        nn.init.constant_(model.head.weight, 1.0)
        model.head.weight.add_(weight, alpha=2.0)
        nn.init.constant_(model.scale, 5.0)
        model.blocks[1][0].bias.index_fill_(0, torch.tensor([1, 2]), 7.0)


EDITS: dict[str, Callable[[Any], None]] = {
    edit.__name__: edit for edit in (in_place, through_data, by_assignment, by_initializer)
}


def edited(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights after an edit, computed in `dtype`."""
    model = build().to(dtype)
    in_place(model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@ranks(2)
@pytest.mark.parametrize("modifier", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_edits_reach_every_rank(modifier: int) -> None:
    right = edited()
    x = torch.randn(2, 4)
    expected = build()
    in_place(expected)
    for stage in (None, 0, 1, 2, 3):
        for name, edit in EDITS.items():
            model = sharded() if stage is None else build()
            with engine_for(model, 3 if stage is None else stage) as engine:
                with GatheredParameters(model.parameters(), modifier_rank=modifier):
                    if dist.get_rank() == modifier:
                        edit(model)
                assert released(model) is (stage in (None, 3))
                after = dict(gathered(model))
                assert agree(after.values()), (stage, name)
                assert all(same(after[key], value) for key, value in right.items()), (stage, name)
                assert torch.equal(engine(x), expected(x)), (stage, name)


@ranks(2)
def test_only_the_named_rank_counts() -> None:
    right = edited()
    for stage in (0, 3):
        model = build()
        with engine_for(model, stage):
            with GatheredParameters(model.parameters(), modifier_rank=0):
                if dist.get_rank() == 0:
                    in_place(model)
                else:
                    model.head.weight.data.fill_(-1.0)
                    model.blocks[0][0].weight.data = torch.full((4, 4), -2.0)
            after = dict(gathered(model))
            assert all(same(after[key], value) for key, value in right.items())


@ranks(2)
def test_every_rank_may_do_the_same() -> None:
    """As scripts that do not ask for their rank are written."""
    right = edited()
    for stage in (1, 3):
        model = build()
        with engine_for(model, stage):
            with GatheredParameters(model.parameters(), modifier_rank=0):
                by_assignment(model)
            assert all(same(value, right[name]) for name, value in gathered(model))


@ranks(2)
def test_before_the_engine() -> None:
    """On a model that was built under `Init`."""
    right = edited()
    for name, edit in EDITS.items():
        for modifier in (0, 1):
            model = sharded()
            with GatheredParameters(model.parameters(), modifier_rank=modifier):
                if dist.get_rank() == modifier:
                    edit(model)
            assert released(model)
            after = dict(gathered(model))
            assert agree(after.values()), name
            assert all(same(after[key], value) for key, value in right.items()), name
            with engine_for(model, 3 * modifier, "bf16"):
                for key, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        master = utils.safe_get_full_fp32_param(parameter)
                        assert master is not None
                        assert same(master, right[key]), (name, modifier, key)


@ranks(2)
def test_between_steps_training_goes_on_from_the_edit() -> None:
    """Momentum is kept; the next update starts from the new weights, as when plain PyTorch's are edited."""
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    plain = build()
    rule = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    x = torch.ones(2, 4)
    for number in range(3):
        plain(x).square().mean().backward()
        rule.step()
        rule.zero_grad()
        if number == 1:
            in_place(plain)
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage, optimizer=optimizer) as engine:
            for number in range(3):
                engine.backward(engine(x).square().mean())
                engine.step()
                if number == 1:
                    with GatheredParameters(model.parameters(), modifier_rank=1):
                        if dist.get_rank() == 1:
                            in_place(model)
            after = dict(gathered(model))
            for name, value in plain.named_parameters():
                torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6, msg=f"stage {stage} {name}")


# ---- 16 bit: masters


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_keep_their_digits_where_nothing_was_edited(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    original = {name: value.detach().clone() for name, value in build().named_parameters()}
    for stage in (0, 1, 3):
        model = build()
        with engine_for(model, stage, precision):
            with GatheredParameters(model.parameters(), modifier_rank=0):
                if dist.get_rank() == 0:
                    model.head.weight.data[1] = 3.0
                    model.blocks[0][0].bias.data = model.blocks[0][0].bias.data.clone()  # the same values
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                master = utils.safe_get_full_fp32_param(parameter)
                assert master is not None
                right = original[name].clone()
                if name == "head.weight":
                    right[1] = 3.0
                assert same(master, right), (stage, name)
            for name, value in gathered(model):
                right = original[name].clone()
                if name == "head.weight":
                    right[1] = 3.0
                assert same(value, right.to(dtype) if right.is_floating_point() else right), (stage, name)


@ranks(2)
def test_an_edit_in_float32_reaches_masters_as_what_the_weights_can_hold() -> None:
    """`parameter.data` may be assigned another dtype; the parameter keeps its own."""
    for stage in (0, 3):
        model = build()
        with engine_for(model, stage, "bf16"):
            with GatheredParameters(model.parameters(), modifier_rank=0):
                model.head.weight.data = torch.full((4, 4), 1.0 + 2.0**-12)
                model.scale.data = torch.tensor(3.0, dtype=torch.float64)
            assert model.head.weight.dtype == model.scale.dtype == torch.bfloat16
            master = utils.safe_get_full_fp32_param(model.head.weight)
            assert master is not None
            assert torch.equal(master, torch.ones(4, 4))
            assert dict(gathered(model))["scale"].item() == 3.0


@ranks(2)
def test_special_values_are_edits_too() -> None:
    for precision in ("fp32", "bf16"):
        for stage in (1, 3):
            model = build()
            with engine_for(model, stage, precision):
                with GatheredParameters(model.parameters(), modifier_rank=0):
                    if dist.get_rank() == 0:
                        model.head.weight.data[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
                        model.head.bias.data.zero_()
                with GatheredParameters(model.parameters(), modifier_rank=0):
                    if dist.get_rank() == 0:
                        model.head.bias.data.neg_()  # minus zero has other bits than zero
                after = dict(gathered(model))
                assert after["head.weight"][0, 0].isnan()
                assert after["head.weight"][0, 1].isinf()
                assert torch.signbit(after["head.weight"][0, 2])
                assert torch.signbit(after["head.bias"]).all()
                master = utils.safe_get_full_fp32_param(model.head.weight)
                assert master is not None
                assert same(master.to(after["head.weight"].dtype), after["head.weight"])


# ---- what is refused or undone


@ranks(2)
def test_a_change_of_shape_is_refused() -> None:
    for stage in (0, 3):
        model, expected = build(), build()
        with engine_for(model, stage):
            for modifier in (None, 0):
                with (
                    pytest.raises(ParameterError, match=r"'head\.weight' changed its shape.*4, 4.*5, 4"),
                    GatheredParameters(model.parameters(), modifier_rank=modifier),
                ):
                    model.head.weight.data = torch.zeros(5, 4)
                assert tuple(model.head.weight.shape) == (4, 4)
                with GatheredParameters(model.parameters()):
                    assert whole(model, expected)
                x = torch.ones(1, 4)
                assert torch.equal(model(x), expected(x))


@ranks(2)
def test_a_change_of_shape_on_one_rank_is_refused_on_all() -> None:
    """Only the named rank edits, so only it sees the wrong shape; the others must not wait for it."""
    for stage in (0, 3):
        model, expected = build(), build()
        with engine_for(model, stage):
            with (
                pytest.raises(ParameterError, match="changed its shape"),
                GatheredParameters(model.parameters(), modifier_rank=1),
            ):
                if dist.get_rank() == 1:
                    model.head.weight.data = torch.zeros(5, 4)
            with GatheredParameters(model.parameters()):
                assert whole(model, expected)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_edits_without_a_modifier_are_undone_with_a_warning(stage: int) -> None:
    """Where the editing rank does not say so, nobody could agree on the values: the same outcome at every stage."""
    for edit in EDITS.values():
        model, expected = build(), build()
        with engine_for(model, stage) as engine:
            with (
                pytest.warns(DiscardedEditWarning, match=r"'blocks\.1\.0\.bias'.*discarded.*modifier_rank"),
                GatheredParameters(model.parameters()),
            ):
                edit(model)
            with warnings.catch_warnings(), GatheredParameters(model.parameters()):
                warnings.simplefilter("error")
                assert whole(model, expected)
            x = torch.ones(1, 4)
            assert torch.equal(engine(x), expected(x))


@ranks(2)
def test_the_warning_names_what_was_edited_wherever_it_lies() -> None:
    """Each rank holds only a part of the edited parameter, and yet some rank must notice; at best all."""
    for stage in (0, 1, 3):
        for name in ("head.weight", "scale", "blocks.0.0.bias", "table"):
            model = build()
            with engine_for(model, stage):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with GatheredParameters(model.parameters()):
                        dict(model.named_parameters())[name].data.fill_(2)
                mine = [str(warning.message) for warning in caught if warning.category is DiscardedEditWarning]
                assert all(len(found) == 1 and f"'{name}'" in found[0] for found in everywhere(mine)), (stage, name)


@ranks(2)
def test_undone_before_the_engine_too() -> None:
    model, expected = sharded(), build()
    with pytest.warns(DiscardedEditWarning, match="discarded"), GatheredParameters(model.parameters()):
        model.head.weight.data.zero_()
    with GatheredParameters(model.parameters()):
        assert whole(model, expected)


@ranks(2)
def test_only_what_was_given_is_watched() -> None:
    """Neighbours in the same unit are gathered along with the parameter; editing them is no more possible than before."""
    for stage in (1, 3):
        model, expected = build(), build()
        with engine_for(model, stage):
            with GatheredParameters([model.head.weight], modifier_rank=0):
                if dist.get_rank() == 0:
                    model.head.weight.data.fill_(4.0)
            after = dict(gathered(model))
            assert torch.equal(after["head.weight"], torch.full((4, 4), 4.0))
            assert all(same(after[n], p) for n, p in expected.named_parameters() if n != "head.weight")


@ranks(2)
def test_a_parameter_that_was_not_named_may_be_neither_seen_nor_edited() -> None:
    for name in ("head.bias", "blocks.0.0.bias"):
        model, expected = build(), build()
        with engine_for(model, 3):
            other = dict(model.named_parameters())[name]
            try:
                with GatheredParameters([model.head.weight, model.blocks[0][0].weight], modifier_rank=0):
                    other.data.fill_(8.0)
            except ParameterError:
                pass
            after = dict(gathered(model))
            assert agree(after.values())
            assert same(after[name], dict(expected.named_parameters())[name]), "an edit nobody published must not stay"


# ---- contexts in contexts, hooks, peculiar parameters


@ranks(2)
def test_an_editing_context_inside_a_reading_one() -> None:
    right = edited()
    for stage in (1, 3):
        model = build()
        with engine_for(model, stage):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with GatheredParameters(model.parameters()):
                    with GatheredParameters(model.parameters(), modifier_rank=0):
                        if dist.get_rank() == 0:
                            in_place(model)
                    assert all(same(value, right[name]) for name, value in model.named_parameters()), stage
            assert all(same(value, right[name]) for name, value in gathered(model)), stage


@ranks(2)
def test_a_reading_context_inside_an_editing_one() -> None:
    """What the outer context is about to publish is no edit of the inner one."""
    right = edited()
    for stage in (1, 3):
        model = build()
        with engine_for(model, stage):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with GatheredParameters(model.parameters(), modifier_rank=0):
                    if dist.get_rank() == 0:
                        in_place(model)
                    with GatheredParameters(model.head.parameters()):
                        pass
            assert all(same(value, right[name]) for name, value in gathered(model)), stage


@ranks(2)
def test_inside_a_hook_of_a_running_forward() -> None:
    """A model that sets its own weights before it uses them."""
    results = []
    for stage in (0, 1, 2, 3):
        model = build()

        def clamp(module: nn.Module, args: Any) -> None:
            with GatheredParameters(module.parameters(), modifier_rank=0):
                if dist.get_rank() == 0:
                    for parameter in module.parameters():
                        parameter.data.clamp_(-0.1, 0.1)

        for block in model.blocks:
            block.register_forward_pre_hook(clamp)
        with engine_for(model, stage) as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4)).square().mean())
                engine.step()
            results.append(dict(gathered(model)))
    assert results[0]["blocks.0.0.weight"].abs().max() <= 0.11
    for other in results[1:]:
        assert all(same(results[0][name], other[name]) for name in other)


@ranks(2)
def test_a_graph_recorded_before_an_edit_is_not_continued() -> None:
    """Its gradients would be of weights that are gone. Plain PyTorch refuses it as well."""
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            loss = engine(torch.ones(2, 4)).square().mean()
            with GatheredParameters(model.parameters(), modifier_rank=0):
                if dist.get_rank() == 0:
                    in_place(model)
            with pytest.raises(RuntimeError):
                engine.backward(loss)
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
            assert engine.was_step_applied()


@ranks(2)
def test_every_kind_of_parameter_can_be_edited() -> None:
    for name in ("scalars", "complex", "mixed_dtypes", "empty", "frozen_integers", "non_contiguous", "tied_across", "tiny"):
        for stage in (0, 3):
            model = CASES[name].build()
            with engine_for(model, stage):
                with GatheredParameters(model.parameters(), modifier_rank=1):
                    if dist.get_rank() == 1:
                        for parameter in model.parameters():
                            parameter.data = (parameter.data.flip(-1) if parameter.dim() else parameter.data) + 1
                    right = [value.detach().clone() for value in model.parameters()]
                mine = [value for _, value in gathered(model)]
                assert agree(mine), (name, stage)
                if dist.get_rank() == 1:
                    assert all(same(one, other) for one, other in zip(mine, right, strict=True)), (name, stage)


@ranks(1, 3)
def test_on_other_numbers_of_ranks(world_size: int) -> None:
    right = edited()
    for stage in (0, 1, 3):
        model = build()
        with engine_for(model, stage):
            with GatheredParameters(model.parameters(), modifier_rank=world_size - 1):
                if dist.get_rank() == world_size - 1:
                    by_assignment(model)
            assert all(same(value, right[name]) for name, value in gathered(model)), stage
            if world_size == 1:
                with pytest.warns(DiscardedEditWarning), GatheredParameters(model.parameters()):
                    model.scale.data.fill_(1.0)
                assert all(same(value, right[name]) for name, value in gathered(model)), stage
