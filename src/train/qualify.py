"""Make a qualification record: `python -m train.qualify [--device cuda|cpu] [--dtype bf16|fp32] [--out FOLDER]`.

Every attention path that accepts a shape runs forward and backward several times in each of two fresh processes. It is
qualified if all results are equal bit for bit, in all repeats and in both processes; its error against a reference in fp64 is
kept beside. The record goes to the user's cache folder, where runs with replay=true find it.
"""

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train import config, determinism
from train.measure import manifest
from train.model import attention, qualified
from train.parallel.build import DTYPES
from train.replay.leaves import Hasher
from train.sweep.freeze import write_json

#: (heads, kv_heads, head_dim) of conf/model, once for each group size and head dim
SHAPES = ((16, 8, 128), (32, 8, 128), (32, 8, 64), (4, 2, 32))
REPEATS = 8
BATCH = 2


def inputs(shape: tuple[int, int, int], length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the output, [B, heads, T, d]: the same numbers in every process."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(BATCH, n, length, head_dim, generator=generator).to(device, dtype) for n in counts]


def run(tensors: list[Tensor], path: str) -> list[Tensor]:
    """out, dq, dk, dv of one forward and backward."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    out = attention.attend(q, k, v, path)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def evidence(
    device: torch.device, dtype_name: str, length: int, shapes: list[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """What one process sees: for each shape, setting and accepting path, the distinct digests and the errors."""
    dtype = DTYPES[dtype_name]
    hasher = Hasher(device, torch.get_num_threads())
    found = []
    for deterministic in (False, True):
        if deterministic:
            determinism.enable(compiled=False)
        attention.probe.cache_clear()  # what a path accepts depends on the setting
        for shape in shapes:
            heads, kv_heads, head_dim = shape
            tensors = inputs(shape, length, dtype, device)
            reference = run([t.double() for t in tensors], "math")
            for path, reason in attention.probe(device, dtype, heads, kv_heads, head_dim).items():
                entry: dict[str, Any] = {
                    "path": path, "dtype": dtype_name, "group": heads // kv_heads, "head_dim": head_dim,
                    "deterministic": deterministic, "shape": [BATCH, heads, kv_heads, length, head_dim],
                }  # fmt: skip
                if reason is not None:
                    found.append(entry | {"rejected": reason})
                    continue
                results = [run(tensors, path) for _ in range(REPEATS)]
                digests = [[hasher.digest(t) for t in result] for result in results]
                found.append(entry | {"digests": digests, "error": _errors(results[0], reference)})
    return found


def _errors(result: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Relative error by norm."""
    named = zip(("out", "dq", "dk", "dv"), result, reference, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in named}


def judge(seen: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Records from what each process saw: bitwise where all digests of all repeats and processes are equal."""
    records = []
    for entries in zip(*seen, strict=True):
        first = dict(entries[0])
        if "rejected" in first:
            records.append(first | {"bitwise": False})
            continue
        every = [tuple(one) for entry in entries for one in entry["digests"]]
        differ = [n for i, n in enumerate(("out", "dq", "dk", "dv")) if len({one[i] for one in every}) > 1]
        del first["digests"]
        records.append(
            first | {"bitwise": not differ, "differ": differ, "results": len(set(every)), "runs": len(every),
                     "processes": len(entries), "digests": list(every[0]) if not differ else []}
        )  # fmt: skip
    return records


def make(device: torch.device, dtype: str, length: int, shapes: list[tuple[int, int, int]]) -> dict[str, Any]:
    """A record file's content, from two fresh processes. Raises RuntimeError when one of them fails."""
    seen = []
    request = json.dumps({"device": str(device), "dtype": dtype, "length": length, "shapes": shapes})
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "train.qualify", "--child", request], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"a qualifying process failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
            )
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    stack = qualified.Stack.here(device)
    cuda = device.type == "cuda"
    return {
        "schema": qualified.SCHEMA,
        "device": torch.cuda.get_device_name(device) if cuda else manifest.cpu_name(),
        "capability": stack.capability,
        "torch": stack.torch_version,
        "cuda": torch.version.cuda if cuda else None,
        "driver": manifest.driver() if cuda else None,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "records": judge(seen),
    }


def file_name(content: dict[str, Any]) -> str:
    """One file for a device, torch and dtype."""
    text = f"{content['device']}-{content['torch']}-{content['records'][0]['dtype']}"
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text) + ".json"


def _shape(text: str) -> tuple[int, int, int]:
    try:
        heads, kv_heads, head_dim = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be heads,kv_heads,head_dim, as in 16,8,128") from None
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise argparse.ArgumentTypeError(f"{text}: heads must be a multiple of kv_heads, and all above 0")
    return heads, kv_heads, head_dim


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m train.qualify", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--length", type=int, help="tokens in a row; default: 2048 on a GPU, 128 on a CPU")
    parser.add_argument(
        "--shape", action="append", type=_shape, help="heads,kv_heads,head_dim; default: those of conf/model"
    )
    parser.add_argument(
        "--out", type=Path, default=qualified.cache(), help="folder of the record; default: %(default)s"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        ask = json.loads(args.child)
        print(
            json.dumps(
                evidence(torch.device(ask["device"]), ask["dtype"], ask["length"], [tuple(s) for s in ask["shapes"]])
            )
        )
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise config.ConfigError("--device", "cuda", "no CUDA device is visible here; use --device cpu")
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    dtype, length = args.dtype or ("bf16" if cuda else "fp32"), args.length or (2048 if cuda else 128)
    content = make(device, dtype, length, args.shape or list(SHAPES))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / file_name(content)
    write_json(path, content)
    for r in content["records"]:
        what = (
            "bitwise"
            if r["bitwise"]
            else f"rejected: {r['rejected']}"
            if "rejected" in r
            else f"{r['results']} results"
        )
        setting = "deterministic" if r["deterministic"] else "default"
        print(f"{r['path']:10} {r['dtype']} group {r['group']} head_dim {r['head_dim']:3} {setting:13} {what}")
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (config.ConfigError, RuntimeError) as e:
        sys.exit(f"error: {e}")
