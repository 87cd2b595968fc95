"""The start of the process group.

Owns the reading of the launcher's environment variables (the only place besides the launcher) and the way into
`torch.distributed`: `shardwise run`, `torchrun` and a plain environment all work. Arguments win over variables; a process
group that exists already is accepted; without a launcher the world is one rank that opens no port. Refuses to know what the
group is used for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from shardwise.comm.meeting import Placement, file_opener, first_line, meet, tcp_opener
from shardwise.device import backend_for
from shardwise.errors import LaunchError, explain

__all__ = [
    "Placement",
    "default_backend",
    "find_placement",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]

START_LIMIT_S = 300.0
"""How long the ranks wait for each other at the start where no timeout is given."""

_ALONE = "to run alone, unset RANK and WORLD_SIZE; to run several ranks, use `shardwise run` or torchrun"

_dist: Any = dist  # its own annotations do not export the stores
log = logging.getLogger("shardwise")


def find_placement(
    environment: Mapping[str, str], *, rank: int = -1, world_size: int = -1, port: int | None = None
) -> Placement:
    """The place of this process, from arguments first and variables second. Touches nothing but `environment`.

    Args:
        environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as launchers set them.
        rank, world_size: win over the variables; negative means not given.
        port: wins over MASTER_PORT.

    Raises:
        LaunchError: a variable is missing or wrong; the message names it and its value.
    """
    own_rank = rank if rank >= 0 else _number(environment, "RANK")
    world = world_size if world_size > 0 else _number(environment, "WORLD_SIZE")
    own_rank, world = _complete(own_rank, world, environment)
    if world < 1:
        raise LaunchError(explain("the world size is wrong", expected="at least 1", found=f"WORLD_SIZE={world}", do=_ALONE))
    if not 0 <= own_rank < world:
        raise LaunchError(
            explain(
                "the rank does not fit the world",
                expected=f"0 <= RANK < WORLD_SIZE={world}",
                found=f"RANK={own_rank}",
                do=_ALONE,
            )
        )
    if world == 1:
        return Placement(0, 1)
    address, master_port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
    chosen = port if port is not None else master_port
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", chosen)) if value in ("", None)]
    if missing or chosen is None:
        raise LaunchError(explain(f"RANK={own_rank} and WORLD_SIZE={world} are set, {' and '.join(missing)} not", do=_ALONE))
    if not 0 < chosen < 65536:
        raise LaunchError(explain("the port is wrong", expected="1 to 65535", found=f"MASTER_PORT={chosen}"))
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and chosen == master_port
    return Placement(own_rank, world, address, chosen, agent, environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _complete(rank: int | None, world: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    if rank is None and world is None:
        if (_number(environment, "LOCAL_RANK") or 0) > 0:
            local = environment["LOCAL_RANK"]
            raise LaunchError(explain(f"LOCAL_RANK={local} is set, RANK and WORLD_SIZE are not", do=_ALONE))
        return 0, 1
    if world is None:
        raise LaunchError(explain(f"RANK={rank} is set, WORLD_SIZE is not", do=_ALONE))
    if rank is None and world != 1:
        raise LaunchError(explain(f"WORLD_SIZE={world} is set, RANK is not", do=_ALONE))
    return rank or 0, world


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(explain(f"{name} is wrong", expected="a whole number", found=f"{name}={text}")) from None


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | float | None = None,
    auto_mpi_discovery: bool = False,
    distributed_port: int | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    dist_init_required: bool | None = None,
    config: Any = None,
    verbose: bool = True,
) -> None:
    """Start the default process group, unless there is one. Collective; every rank calls it.

    Args:
        dist_backend: "gloo", "nccl", "cpu:gloo,cuda:nccl"; None picks one for this machine's devices and for CPU tensors.
        timeout: limit for the start and for each later collective, as timedelta or seconds. None: 300 s for the start, and
            torch's own default for collectives.
        auto_mpi_discovery: accepted and without effect; MPI is never asked.
        distributed_port: wins over MASTER_PORT.
        init_method: "env://" (the default), "tcp://host:port" or "file:///path"; others are handed to torch.
        rank, world_size: win over RANK and WORLD_SIZE.
        dist_init_required: False if the group must exist already.
        config: accepted and without effect.
        verbose: log one line on rank 0.

    Raises:
        LaunchError: something is missing or wrong, or not all ranks arrived in time.
    """
    del auto_mpi_discovery, config
    if is_initialized():
        return
    if dist_init_required is False:
        raise LaunchError(
            explain("dist_init_required=False, but there is no process group", do="start one first, or leave the argument out")
        )
    backend = _checked_backend(dist_backend)
    collective_limit = _as_timedelta(timeout)
    deadline = time.monotonic() + (START_LIMIT_S if collective_limit is None else collective_limit.total_seconds())
    place, url = _placed(init_method, rank, world_size, distributed_port)
    if url is not None and url.scheme not in {"tcp", "file"}:
        _start(backend, place, collective_limit, init_method=init_method)
    elif place.world_size == 1:
        _start(backend, place, collective_limit, store=_dist.HashStore())
    else:
        open_store = file_opener(url.path, place) if url is not None and url.scheme == "file" else tcp_opener(place)
        _start(backend, place, collective_limit, store=meet(open_store, place, deadline))
    if verbose and place.rank == 0:
        log.info("process group: %d rank%s, backend %s", place.world_size, "" if place.world_size == 1 else "s", backend)


def _placed(init_method: str | None, rank: int, world_size: int, port: int | None) -> tuple[Placement, Any]:
    """The placement, and the parsed `init_method` where it says something else than the environment."""
    if init_method is None or init_method.startswith("env:"):
        return find_placement(os.environ, rank=rank, world_size=world_size, port=port), None
    url = urlparse(init_method)
    try:
        address, url_port = url.hostname or "", url.port
    except ValueError:
        address, url_port = "", None
    if url.scheme == "tcp" and (not address or not url_port):
        raise LaunchError(explain("init_method is wrong", expected="tcp://host:port", found=repr(init_method)))
    if url.scheme == "file" and not url.path:
        raise LaunchError(explain("init_method is wrong", expected="file:///path", found=repr(init_method)))
    # The address in the environment belongs to another meeting point; only rank and world size are taken from there.
    known = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    known |= {"MASTER_ADDR": address or "-", "MASTER_PORT": str(url_port or 1)}
    return find_placement(known, rank=rank, world_size=world_size), url


def _start(
    backend: str,
    place: Placement,
    timeout: timedelta | None,
    *,
    store: Any = None,
    init_method: str | None = None,
) -> None:
    try:
        dist.init_process_group(
            backend, init_method, timeout=timeout, world_size=place.world_size, rank=place.rank, store=store
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            explain(
                f"rank {place.rank} could not start the process group with backend {backend}",
                found=first_line(error),
                do="check the network settings (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and that every rank was started alike",
            )
        ) from error


def _as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    span = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    if span <= timedelta(0):
        raise LaunchError(explain("timeout is wrong", expected="more than 0 seconds", found=repr(timeout)))
    return span


# Backends


def default_backend() -> str:
    """The backend for this machine: gloo for CPU tensors, and the accelerator's own beside it where there is one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return "gloo"
    own = backend_for(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def _checked_backend(asked: str | None) -> str:
    if asked is None:
        return default_backend()
    for part in asked.lower().split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            have = [known for known in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(known)]
            raise LaunchError(
                explain(f"dist_backend={asked!r} is not available in this torch", expected=" or ".join(have), do="leave it out")
            )
        if name == "nccl" and "nccl" not in default_backend():
            raise LaunchError(
                explain(f"dist_backend={asked!r} needs a CUDA device, and there is none here", do="leave it out, or use gloo")
            )
    return asked.lower()


# What anyone may ask


def is_initialized() -> bool:
    """True when there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def get_world_size() -> int:
    """Ranks in the job; 1 without a process group."""
    return dist.get_world_size() if is_initialized() else 1


def get_local_rank() -> int:
    """The number of this process on its machine, as the launcher says in LOCAL_RANK.

    Without that variable: the rank, wrapped at the number of accelerators where there are any; 0 without a process group.

    Raises:
        LaunchError: LOCAL_RANK is not a number.
    """
    local_rank = _number(os.environ, "LOCAL_RANK")
    if local_rank is not None:
        return local_rank
    return get_rank() % max(1, torch.accelerator.device_count() or get_world_size())
