"""Which modules become units, and which unit each parameter belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwise.errors import ParameterError
from shardwise.policy import STAGES, Policy
from shardwise.utils import set_z3_leaf_module, set_z3_leaf_modules
from shardwise.zero.discovery import find_units, plan_units


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(2, 2), nn.Linear(2, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(2, 3)


def policy(*units: str, leaves: tuple[str, ...] = ()) -> Policy:
    return Policy(STAGES[3], units=units, leaf_modules=leaves)


def names(model: nn.Module, *units: str, leaves: tuple[str, ...] = ()) -> list[str]:
    return [name for name, _ in find_units(model, policy(*units, leaves=leaves))]


def owners(model: nn.Module, *units: str, leaves: tuple[str, ...] = ()) -> dict[str, str]:
    return {named.name: plan.name for plan in plan_units(model, policy(*units, leaves=leaves)) for named in plan.parameters}


def test_the_repeated_block_is_found() -> None:
    assert names(Model()) == ["blocks.0", "blocks.1"]


def test_a_single_block_is_not_repeated_but_its_parts_may_be() -> None:
    assert names(Model(blocks=1)) == ["blocks.0.mlp.0", "blocks.0.mlp.2"]


def test_a_repeated_block_hides_the_repetition_inside_it_where_that_is_of_bare_layers() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    assert names(model) == ["0", "1"]


def test_of_nested_repetitions_the_innermost_composed_one_is_taken() -> None:
    model = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    assert names(model) == ["0.0", "0.1", "1.0", "1.1"]


def test_containers_without_parameters_are_no_units() -> None:
    assert names(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(2, 2))) == []


def test_a_sequential_of_different_layers_is_one_unit_with_its_model() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == []


def test_a_module_with_several_names_is_one_unit_and_holds_its_parameters() -> None:
    """Layers that share all weights are often written as one module many times in a list."""
    block = Block()
    model = nn.ModuleDict({"entry": nn.Linear(2, 2), "layers": nn.ModuleList([block, block, block])})
    assert names(model) == ["layers.0"]
    assert owners(model)["layers.0.attention.q.weight"] == "layers.0"
    assert owners(model)["entry.weight"] == ""
    assert names(model, "layers.2") == ["layers.0"]
    assert names(model, leaves=("layers.1",)) == []


def test_hugging_face_names_win_over_repetition() -> None:
    model = Model()
    model._no_split_modules = ["Attention"]  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert names(model) == ["blocks.0.attention", "blocks.1.attention"]


def test_hugging_face_names_of_a_submodule_count() -> None:
    model = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    model["encoder"]._no_split_modules = {"Block"}  # pyright: ignore[reportArgumentType]
    assert names(model) == [f"{part}.blocks.{index}" for part in ("encoder", "decoder") for index in (0, 1)]


@pytest.mark.parametrize("value", [None, [], ["Missing"]])
def test_hugging_face_names_that_match_nothing_are_ignored(value: Any) -> None:
    model = Model()
    model._no_split_modules = value
    assert names(model) == ["blocks.0", "blocks.1"]


def test_units_named_by_the_user_win() -> None:
    model = Model()
    model._no_split_modules = ["Block"]  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert names(model, "Attention") == ["blocks.0.attention", "blocks.1.attention"]
    assert names(model, "blocks.[0]") == ["blocks.0"]
    assert names(model, "embed", "head") == ["embed", "head"]
    assert names(model, f"{__name__}.Block") == ["blocks.0", "blocks.1"]


def test_the_model_itself_may_be_named() -> None:
    assert names(Model(), "Model") == []
    assert set(owners(Model(), "Model").values()) == {""}


def test_nested_units_are_legal() -> None:
    found = owners(Model(), "Block", "Attention")
    assert found["blocks.1.attention.q.weight"] == "blocks.1.attention"
    assert found["blocks.1.mlp.0.weight"] == "blocks.1"
    assert found["head.weight"] == ""


def test_a_unit_that_does_not_exist_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ParameterError, match=r"zero_optimization\.units names 'Blok'.*Block") as info:
        names(Model(), "Block", "Blok")
    assert "Model" in str(info.value)


def test_every_parameter_belongs_to_exactly_one_unit() -> None:
    model = Model()
    plans = plan_units(model, policy())
    assigned = [named.parameter for plan in plans for named in plan.parameters]
    assert len(assigned) == len(set(assigned))
    assert set(assigned) == set(model.parameters())
    assert [plan.name for plan in plans] == ["", "blocks.0", "blocks.1"]
    assert plans[0].module is model


def test_a_parameter_tied_inside_a_unit_stays_there() -> None:
    model = Model()
    model.blocks[0].mlp[2].weight = model.blocks[0].attention.q.weight
    plans = {plan.name: plan for plan in plan_units(model, policy())}
    tied = next(named for named in plans["blocks.0"].parameters if named.name == "blocks.0.attention.q.weight")
    assert tied.aliases == ("blocks.0.mlp.2.weight",)


def test_a_parameter_tied_across_units_belongs_to_the_innermost_around_all() -> None:
    model = Model()
    model.blocks[0].attention.k.weight = model.blocks[0].attention.q.weight
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight
    found = owners(model, "Block", "Attention")
    assert found["blocks.0.attention.q.weight"] == "blocks.0.attention"
    assert found["blocks.0.mlp.0.weight"] == ""
    model.blocks[0].mlp[2].weight = model.blocks[0].attention.q.weight
    assert owners(model, "Block", "Attention")["blocks.0.attention.q.weight"] == "blocks.0"


def test_a_module_shared_by_two_units_belongs_to_the_innermost_around_both() -> None:
    model = Model()
    model.blocks[1].attention = model.blocks[0].attention
    found = owners(model)
    assert found["blocks.0.attention.q.weight"] == ""
    assert found["blocks.0.mlp.0.weight"] == "blocks.0"


# ---- leaf modules


def test_a_leaf_is_no_unit_and_has_none_inside() -> None:
    model = Model()
    assert names(model, leaves=("blocks.0",)) == ["blocks.1"]
    assert names(model, leaves=("Block",)) == []
    assert names(model, leaves=("blocks",)) == []
    assert names(model, leaves=("*.attention",)) == ["blocks.0", "blocks.1"]


def test_a_leafs_parameters_belong_to_the_unit_around_it() -> None:
    found = owners(Model(3), "Block", "Attention", leaves=("blocks.0.attention", "blocks.1"))
    assert found["blocks.0.attention.q.weight"] == "blocks.0"
    assert found["blocks.1.attention.q.weight"] == ""
    assert found["blocks.2.attention.q.weight"] == "blocks.2.attention"


def test_naming_a_unit_inside_a_leaf_is_told() -> None:
    with pytest.raises(ParameterError, match="'Attention', which is found only inside modules declared as leaf"):
        names(Model(), "Attention", leaves=("Block",))
    assert names(Model(), "blocks.*", leaves=("blocks.1",))[0] == "blocks.0"


def test_a_leaf_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ParameterError, match=r"zero_optimization\.leaf_module names 'Expert'"):
        names(Model(), leaves=("Expert",))


def test_leaves_marked_by_hand() -> None:
    model, other = Model(), Model()
    set_z3_leaf_modules(model, [Block])
    assert names(model) == []
    assert names(other) == ["blocks.0", "blocks.1"]
    set_z3_leaf_module(model.blocks[0], False)
    assert names(model) == ["blocks.0"]


def test_a_model_that_is_a_leaf_itself_is_one_unit() -> None:
    assert names(Model(), leaves=("Model",)) == []
    assert set(owners(Model(), leaves=("Model",)).values()) == {""}
