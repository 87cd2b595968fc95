"""Makes tests/data/deepspeed.tar.xz: checkpoints that DeepSpeed itself wrote, and what it says is in them.

Run it with an interpreter that has DeepSpeed (see README.md): `python tests/data/make_deepspeed.py DIRECTORY [CASE ...]`. Each
case becomes a directory with the checkpoint and with `expected.safetensors`, whose values DeepSpeed's own functions gathered.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Name of a case: stage, precision, number of ranks, what is peculiar.
CASES = [
    "0-fp32-2",
    "0-bf16-2",
    "0-fp16-2",
    "1-fp32-2",
    "1-bf16-3",
    "1-fp16-2",
    "1-bf16-2-nccl",
    "2-fp32-1",
    "2-fp32-3",
    "2-bf16-2",
    "2-fp16-2-elastic",
    # Without alignment DeepSpeed's own functions gather wrong values after this reordering; the checkpoint itself is right.
    "2-bf16-2-roundrobin-aligned",
    "2-fp32-3-aligned",
    "3-fp32-1",
    "3-fp32-2",
    "3-bf16-3",
    "3-fp16-2-subgroups",
    "3-bf16-2-nofrozen",
]
STATES = ("exp_avg", "exp_avg_sq")


class Tiny(nn.Module):
    """Odd sizes, tied weights, a frozen layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.middle = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5, bias=False))
        self.gain = nn.Parameter(torch.linspace(0.9, 1.1, 5))
        self.scale = nn.Parameter(torch.tensor([0.9]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 5))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.embed(tokens)))
        return self.head((x + self.middle(x)) * self.gain * self.scale + self.shift.to(x.dtype)).float()


def settings(case: str) -> dict[str, Any]:
    stage, precision, _, *rest = case.split("-")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 4},
        "wall_clock_breakdown": False,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 2}
    if "elastic" in rest:
        config["zero_optimization"]["elastic_checkpoint"] = True
    if "roundrobin" in rest:
        config["zero_optimization"]["round_robin_gradients"] = True
    if "aligned" in rest:
        config["zero_optimization"]["parameter_alignment"] = True
    if "subgroups" in rest:
        config["zero_optimization"]["sub_group_size"] = 20
    if "nccl" in rest:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage != "0":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}}
    return config


def train(case: str, out: Path) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    get_accelerator().is_fp16_supported = lambda: True  # on a CPU it says no for want of speed; torch can do it
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.95))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(case))
    torch.manual_seed(1 + torch.distributed.get_rank())
    for _ in range(8 if "fp16" in case else 3):  # some of these overflow
        tokens = torch.randint(0, 7, (4,))
        engine.backward(nn.functional.cross_entropy(engine(tokens), tokens))
        engine.step()
    exclude = case.endswith("nofrozen")
    engine.save_checkpoint(str(out), client_state={"note": "by the user"}, exclude_frozen_parameters=exclude)

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links parameters to optimizer state after the step of the first group, when the second has no state yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    stage = int(case[0])
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
            continue
        if hasattr(parameter, "_hp_mapping") or stage == 3:
            weights[name] = safe_get_full_fp32_param(parameter).clone()
            moments[name] = {state: safe_get_full_optimizer_state(parameter, state).clone() for state in STATES}
        elif case == "0-fp32-2":
            weights[name] = parameter.detach().clone()
            moments[name] = {state: optimizer.state[parameter][state].clone() for state in STATES}
        else:  # DeepSpeed's functions do not know this optimizer, which keeps a master of each parameter
            masters = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
            pairs = [pair for group in masters for pair in zip(*group, strict=True)]
            master = next(master for member, master in pairs if member is parameter)
            weights[name] = master.detach().clone()
            moments[name] = {state: optimizer.state[master][state].clone() for state in STATES}
    tensors = {f"weight/{name}": value for name, value in weights.items()}
    tensors |= {f"buffer/{name}": buffer for name, buffer in engine.module.named_buffers()}
    tensors |= {f"{state}/{name}": value for name, states in moments.items() for state, value in states.items()}
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    facts = {
        "counters": {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")},
        "steps": max(int(state["step"]) for state in optimizer.state.values()),
        "loss_scale": getattr(scaler, "cur_scale", None),
        "schedule": engine.lr_scheduler.state_dict() if engine.lr_scheduler else {},
        "lr": [group["lr"] for group in optimizer.param_groups],
        "version": deepspeed.__version__,
    }
    if torch.distributed.get_rank() == 0:
        write_safetensors(out / "expected.safetensors", tensors, {"facts": json.dumps(facts)})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """In that format: the length of a JSON header, the header, the values."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
    header: dict[str, Any] = {"__metadata__": metadata}
    values = b""
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(values), len(values) + len(data)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        values += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


def pack(root: Path, cases: list[str], target: Path) -> None:
    """One archive, compressed together: the files resemble each other."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(path for case in cases for path in (root / case).rglob("*")):
            if path.is_file() and path.suffix != ".py":
                entry = tarfile.TarInfo(str(path.relative_to(root)))
                data = path.read_bytes()
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        train(args.cases[0], args.out / args.cases[0])
        return
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for number, case in enumerate(args.cases):
        (args.out / case).mkdir(parents=True, exist_ok=True)
        ranks, port = case.split("-")[2], str(29610 + number)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", ranks, "--master_port", port]
        subprocess.run([*launch, __file__, str(args.out), case, "--worker"], check=True, env=environment)
    pack(args.out, args.cases, args.out / "deepspeed.tar.xz")


if __name__ == "__main__":
    main()
