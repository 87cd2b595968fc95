"""Built-in update rules on cut parameters against torch's own classes (or a reference from the paper) on whole ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.errors import OptimizerError
from shardwise.optim import StepSettings, plan_groups
from shardwise.optim.rules import UNIT, AdagradRule, AdamRule, LionRule, SgdRule
from tests.unit.optim_support import Job, Reference, Setup, close, make_grads

UNUSED: tuple[Sequence[int], ...] = ((), (4,), (4, 7), (), (0, 1, 2, 4, 5, 6, 7), ())


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, line by line."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for theta in (p for p in group["params"] if p.grad is not None):
                m = self.state[theta].setdefault("exp_avg", torch.zeros_like(theta))
                c = beta1 * m + (1 - beta1) * theta.grad
                theta.sub_(group["lr"] * (torch.sign(c) + group["weight_decay"] * theta))
                m.copy_(beta2 * m + (1 - beta2) * theta.grad)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962 with the ratio clamped; norms in double."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for x in (p for p in group["params"] if p.grad is not None):
                state = self.state[x]
                if not state:
                    state.update(t=0, m=torch.zeros_like(x), v=torch.zeros_like(x))
                state["t"] += 1
                state["m"] = beta1 * state["m"] + (1 - beta1) * x.grad
                state["v"] = beta2 * state["v"] + (1 - beta2) * x.grad**2
                correct = group["bias_correction"]
                m = state["m"] / (1 - beta1 ** state["t"] if correct else 1)
                v = state["v"] / (1 - beta2 ** state["t"] if correct else 1)
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * x
                norm, step_norm = x.double().norm().item(), update.double().norm().item()
                ratio = min(max(norm / step_norm, group["min_coeff"]), group["max_coeff"]) if norm and step_norm else 1.0
                x.sub_(group["lr"] * ratio * update)


LAMB = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
LAMB |= {"min_coeff": 0.01, "max_coeff": 10.0}

# name, configuration section, the same in plain torch
CASES: list[tuple[str, dict[str, Any], Callable[[list[Parameter]], torch.optim.Optimizer]]] = [
    ("adamw", {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}, lambda p: torch.optim.AdamW(p, lr=0.01)),
    (
        "adamw options",
        {"type": "adamw", "params": {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.2, "torch_adam": True}},
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2),
    ),
    (
        "adam is adamw",
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    (
        "adam with L2",
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    ),
    (
        "amsgrad maximize",
        {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True, "maximize": True}},
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    ),
    ("sgd", {"type": "SGD", "params": {"lr": 0.1}}, lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        "sgd momentum",
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    (
        "sgd nesterov",
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8, "nesterov": True, "maximize": True}},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, maximize=True),
    ),
    (
        "adagrad",
        {
            "type": "Adagrad",
            "params": {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.5},
        },
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5),
    ),
    (
        "lion",
        {"type": "Lion", "params": {"lr": 0.01, "betas": [0.9, 0.98], "weight_decay": 0.3}},
        lambda p: Lion(p, lr=0.01, betas=(0.9, 0.98), weight_decay=0.3),
    ),
    ("lamb", {"type": "Lamb", "params": LAMB}, lambda p: Lamb(p, **LAMB)),
    (
        "lamb clamped",
        {"type": "LAMB", "params": {**LAMB, "min_coeff": 0.5, "max_coeff": 0.7, "bias_correction": False}},
        lambda p: Lamb(p, **{**LAMB, "min_coeff": 0.5, "max_coeff": 0.7, "bias_correction": False}),
    ),
]
NAMES = [name for name, *_ in CASES]


def config(section: dict[str, Any]) -> Callable[[list[Parameter]], tuple[Any, Any, Any]]:
    return lambda params: (None, params, section)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("name", "section", "make"), CASES, ids=NAMES)
def test_rule_matches_torch(name: str, section: dict[str, Any], make: Any, world: int) -> None:
    job = Job(config(section), Setup(world, seed=world, settings=StepSettings(clip=5.0)))
    reference = Reference(job, make)
    for number, unused in enumerate(UNUSED):
        grads = make_grads(number, unused=unused)
        norm = reference.step(grads, clip=5.0)
        # As the engine does: the sum over 6 micro-batches and ranks, divided once.
        reports = job.step([None if grad is None else grad * 6.0 for grad in grads], denominator=6.0)
        assert reports[0].grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert all(report == reports[0] for report in reports)
    close(job.gather(), reference.params)


def three_steps(section: dict[str, Any], setup: Setup) -> list[Tensor]:
    shapes = ((70, 1000), (33,), (200, 701), (5,))
    job = Job(config(section), setup, shapes)
    for number in range(3):
        job.step(make_grads(number, shapes, unused=(1,) if number == 1 else ()), denominator=3.0)
    return job.gather()


ELEMENTWISE = [case for case in CASES if not case[0].startswith("lamb")]


@pytest.mark.parametrize(("name", "section", "make"), ELEMENTWISE, ids=[name for name, *_ in ELEMENTWISE])
def test_cuts_do_not_change_a_bit(name: str, section: dict[str, Any], make: Any) -> None:
    whole = three_steps(section, Setup(1, 3, align=12))
    for world, replicas in ((2, 1), (3, 1), (4, 2)):
        cut = three_steps(section, Setup(world, 3, align=12, replicas=replicas))
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)), f"{world} ranks"


@pytest.mark.parametrize(("name", "section", "make"), CASES, ids=NAMES)
def test_two_copies_and_two_halves_agree_bit_for_bit(name: str, section: dict[str, Any], make: Any) -> None:
    """Stage 0 and stage 1 on two ranks, with everything that sums over ranks: norm, clipping, trust ratios."""
    settings = StepSettings(clip=1.0)
    halves, copies = (three_steps(section, Setup(2, 3, align=12, replicas=n, settings=settings)) for n in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(halves, copies, strict=True))


@pytest.mark.parametrize("unused_first", [True, False])
@pytest.mark.parametrize(("name", "section", "make"), CASES, ids=NAMES)
def test_unused_parameters_keep_every_bit_and_have_no_state(
    name: str, section: dict[str, Any], make: Any, unused_first: bool
) -> None:
    job = Job(config(section), Setup(2))
    if not unused_first:
        job.step(make_grads(0))
    before, key = job.gather(), {"sgd momentum": "momentum_buffer", "adagrad": "sum"}.get(name, "exp_avg")
    state = job.gather_state(key)
    job.step(make_grads(1, unused=(0, 5)))
    after = job.gather()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[5], after[5])
    assert not torch.equal(before[1], after[1])
    for number in (0, 5):
        assert (number in job.gather_state(key)) == (number in state)
        if number in state:
            assert torch.equal(job.gather_state(key)[number], state[number])
    steps = {piece.name: step for shard in job.paths[0].shards for piece, step in zip(shard.pieces, shard.steps, strict=True)}
    assert steps["p0"] == (0 if unused_first else 1)


@pytest.mark.parametrize(("name", "section", "make"), CASES, ids=NAMES)
def test_sixteen_bit_gradients_and_weights(name: str, section: dict[str, Any], make: Any) -> None:
    setup = Setup(2, grad=torch.bfloat16, weight=torch.bfloat16)
    job = Job(config(section), setup, ((300, 999), (7,)))
    reference = Reference(job, make)
    for number in range(3):
        grads = [grad.bfloat16().float() for grad in make_grads(number, ((300, 999), (7,))) if grad is not None]
        reference.step(grads)
        job.step(grads)
    # A sign that flips where a direction is near zero is a whole step of Lion.
    close(job.gather(), reference.params, atol=0.03 if name == "lion" else 1e-6)
    assert all(torch.equal(w, m.bfloat16()) for w, m in zip(job.gather("weight"), job.gather(), strict=True))


def test_low_precision_masters_and_state() -> None:
    setup = Setup(2, master=torch.bfloat16, grad=torch.bfloat16, settings=StepSettings(state_dtype=torch.bfloat16))
    job = Job(config({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}), setup)
    reference = Reference(job, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    for number in range(4):
        grads = [grad.bfloat16() for grad in make_grads(number) if grad is not None]
        reference.step(grads)
        job.step(grads)
    close(job.gather(), reference.params, rtol=2**-7, atol=2**-7)
    assert {tensor.dtype for path in job.paths for shard in path.shards for tensor in shard.state.values()} == {torch.bfloat16}


def test_double_masters_compute_in_double() -> None:
    section = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    job = Job(config(section), Setup(2, master=torch.float64, grad=torch.float64, settings=StepSettings(clip=1.0)))
    reference = Reference(job, lambda p: torch.optim.AdamW(p, lr=0.01))
    for number in range(3):
        grads = [grad.double() for grad in make_grads(number) if grad is not None]
        reference.step(grads, clip=1.0)
        job.step(grads)
    close(job.gather(), reference.params, rtol=1e-12, atol=1e-13)


def test_groups_with_their_own_options() -> None:
    def groups(p: list[Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": p[:3], "lr": 0.1, "weight_decay": 0.0},
            {"params": []},
            {"params": p[3:6], "betas": (0.5, 0.9)},
            {"params": p[6:], "lr": 0.001, "weight_decay": 0.5},
        ]

    section = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    job = Job(lambda p: (None, groups(p), section), Setup(2))
    reference = Reference(job, lambda p: torch.optim.AdamW(groups(p), lr=0.01))
    for number in range(3):
        grads = make_grads(number)
        for plan in job.plans:
            plan.param_groups[0]["lr"] *= 0.5
        reference.optimizer.param_groups[0]["lr"] *= 0.5
        reference.step(grads)
        job.step(grads)
    close(job.gather(), reference.params)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_bias_correction_can_be_turned_off(bias_correction: bool) -> None:
    section = {"type": "AdamW", "params": {"lr": 0.01, "bias_correction": bias_correction, "weight_decay": 0.0}}
    job = Job(config(section), Setup(1), ((40,),))
    grad = make_grads(0, ((40,),))[0]
    assert grad is not None
    start = job.gather()[0].clone()
    job.step([grad])
    mean, square = 0.1 * grad, 0.001 * grad**2
    if bias_correction:
        mean, square = mean / 0.1, square / (1 - 0.999)
    close([job.gather()[0]], [start - 0.01 * mean / (square.sqrt() + 1e-8)])


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (AdamRule(decoupled=True), {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": True}),
        (AdamRule(decoupled=False), {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": True}),
        (SgdRule(), {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1}),
        (SgdRule(), {"lr": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
        (AdagradRule(), {"lr": 0.01, "lr_decay": 0.2, "eps": 1e-10, "weight_decay": 0.1, "maximize": True}),
    ],
)
def test_tensor_expressions_agree_with_the_fused_kernels(rule: Any, options: dict[str, Any]) -> None:
    p, g = torch.randn(UNIT * 4), torch.randn(UNIT * 4)
    state = [torch.rand(UNIT * 4) + 0.5 for _ in rule.state_names(options)]
    assert rule.fused(p.device, p.dtype)
    fused = [p.clone(), *(one.clone() for one in state)]
    rule.update(fused[0], g, fused[1:], 3, options)
    plain = [p.clone(), *(one.clone() for one in state)]
    rule.plain(plain[0], g, plain[1:], 3, options)
    close(plain, fused, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", [AdamRule(decoupled=True), SgdRule(), AdagradRule(), LionRule()], ids=lambda rule: rule.name)
def test_an_element_gets_the_same_bits_wherever_it_stands(rule: Any) -> None:
    """What cutting rests on: kernels at multiples of UNIT, and expressions anywhere."""
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "lr_decay": 0.1}
    options |= {"momentum": 0.9, "dampening": 0.1, "nesterov": False}
    size = UNIT * 10
    tensors = [torch.randn(size), torch.randn(size), *(torch.rand(size) for _ in rule.state_names(options))]
    functions = [(rule.update, UNIT)] + ([(rule.plain, 1)] if hasattr(rule, "plain") else [(rule.update, 1)])
    for function, unit in functions:
        whole = [one.clone() for one in tensors]
        function(whole[0], whole[1], whole[2:], 4, options)
        for start, stop in ((0, 1), (3, 8), (1, 9), (0, size // unit - 1)):
            part = [one[start * unit : stop * unit].clone() for one in tensors]
            function(part[0], part[1], part[2:], 4, options)
            assert torch.equal(part[0], whole[0][start * unit : stop * unit])


def test_one_kernel_call_per_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters there are; one more for the elements that do not fill a vector."""
    shapes = tuple((number, 3) for number in range(1, 200))
    job = Job(config({"type": "AdamW", "params": {}}), Setup(1), shapes)
    calls: list[int] = []
    kernel = AdamRule.kernel
    monkeypatch.setattr(AdamRule, "kernel", lambda self, p, *rest: (calls.append(len(p)), kernel(self, p, *rest))[1])
    job.step(make_grads(0, shapes), denominator=3.0)
    assert len(calls) == 2
    assert calls[0] > 100 * UNIT > calls[1]


@pytest.mark.parametrize(("keep", "changed"), [(True, False), (False, True)])
def test_gradients_can_be_kept(keep: bool, changed: bool) -> None:
    job = Job(config({"type": "AdamW", "params": {"lr": 0.01}}), Setup(1, settings=StepSettings(keep_grad=keep)), ((100, 30),))
    grads = make_grads(0, ((100, 30),))
    job.step(grads, denominator=3.0)
    assert grads[0] is not None
    piece = job.paths[0].shards[0].pieces[0]
    assert torch.equal(job.paths[0].shards[0].grad[piece.start : piece.stop], grads[0].view(-1)) != changed


def test_missing_gradient_of_a_used_parameter_is_zero() -> None:
    job = Job(config({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}), Setup(1), ((9,),))
    job.step(make_grads(0, ((9,),)))
    path, before = job.paths[0], job.gather()[0].clone()
    buffer = job.gather_state("momentum_buffer")[0].clone()
    path.shards[0].grad = None
    path.run(job.plans[0].param_groups, 1.0, [True])
    close([job.gather()[0]], [before - 0.1 * 0.5 * buffer])


def test_state_starts_when_it_is_needed() -> None:
    job = Job(config({"type": "AdamW", "params": {}}), Setup(1))
    assert job.paths[0].driver.state_bytes() == 0
    job.step(make_grads(0))
    elements = len(job.paths[0].shards[0].master)
    assert job.paths[0].driver.state_bytes() == 2 * 4 * elements


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "AdamW", "params": {"learning_rate": 1}}, ["learning_rate"]),
        ({"type": "AdamW", "params": {"beta": (0.9, 0.9)}}, ["'beta'", "'betas'"]),
        ({"type": "Lion", "params": {"eps": 1}}, ["Lion", "eps"]),
        ({"type": "Lion", "params": {"lr": -1.0}}, ["lr", "-1.0"]),
        ({"type": "Lamb", "params": {"betas": (0.9, 1.0)}}, ["betas"]),
        ({"type": "Lamb", "params": {"lr": math.nan}}, ["lr", "nan"]),
        ({"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}, ["esterov"]),
        ({"type": "Adm", "params": {}}, ["'Adm'", "AdamW"]),
        ({"params": {}}, ["type"]),
    ],
)
def test_bad_sections_are_refused(section: dict[str, Any], words: list[str]) -> None:
    params = [Parameter(torch.zeros(3))]
    with pytest.raises(OptimizerError) as caught:
        plan_groups(None, params, [("w", params[0])], section)
    assert all(word in str(caught.value) for word in words)


def test_lamb_sums_once_per_step() -> None:
    job = Job(config({"type": "Lamb", "params": {}}), Setup(2))
    job.step(make_grads(0))
    assert job.reducer.calls[0] == ["gradient norm", "trust ratio norms"]
    assert job.reducer.calls[1] == job.reducer.calls[0]


def test_whole_tensor_state_shapes() -> None:
    """A 0-d and an empty parameter: state of the right size, or none."""
    job = Job(config({"type": "AdamW", "params": {}}), Setup(2))
    job.step(make_grads(0))
    state: dict[int, Tensor] = job.gather_state("exp_avg")
    assert 3 not in state
    assert state[2].shape == (1,)
    assert not any(value.isnan().any() for value in state.values())
