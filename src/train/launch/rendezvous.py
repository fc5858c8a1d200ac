"""How ranks find each other: rank 0 lets the system pick a free port and publishes host:port in the point folder."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def join(folder: Path, rank: int, world: int, device: torch.device, timeout: float, name: str = "rendezvous") -> None:
    """Initialise the default process group (NCCL on CUDA, gloo on a CPU). Raises TimeoutError when rank 0 never spoke.

    Ranks that start together meet in one file `name`.
    """
    file = folder / name
    limit = timedelta(seconds=timeout)
    host = os.environ.get("MFU_SWEEP_HOST", "127.0.0.1")
    if rank == 0:
        store = dist.TCPStore(host, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        temp = file.with_name(f".{name}.{os.getpid()}")
        temp.write_text(f"{host}:{store.port}")
        os.replace(temp, file)
    else:
        deadline = time.monotonic() + timeout
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 published no rendezvous within {timeout:.0f} s")
            time.sleep(0.005)
        address, port = file.read_text().rsplit(":", 1)
        store = dist.TCPStore(address, int(port), world, is_master=False, timeout=limit, wait_for_workers=False)
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip


def gloo_interface() -> None:
    """Keep gloo on the loopback device when all ranks are on this host and its name does not resolve."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
