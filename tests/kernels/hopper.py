"""python -m tests.kernels.hopper: compile every kernel for Hopper as dense_1b asks for it; no GPU. A JSON line a kernel:
registers, bytes spilled, widths of its loads and stores."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from train.kernels.jit import adamw, loss, norm, ordered, rope, swiglu

BF16, F32, I64 = "*bf16", "*fp32", "*i64"
ALIGNED = [["tt.divisibility", 16]]


def compiled(kernel: Any, types: dict[str, str], warps: int, **constants: Any) -> dict[str, Any]:
    """`types`: of the arguments; a number with a * behind it is one that is divisible by 16."""
    signature = {n: t.rstrip("*") if t[0] != "*" else t for n, t in types.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    at = {n: i for i, n in enumerate(kernel.arg_names)}
    constexprs = {(at[n],): v for n, v in constants.items()}
    attributes = {(at[n],): ALIGNED for n, t in types.items() if t[0] == "*" or t.endswith("*")}
    source = ASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, constexprs, attributes)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return {"kernel": kernel.__name__, "shared": done.metadata.shared, **resources(done.asm["cubin"])} | {
        "widths": sorted(set(re.findall(r"(?:ld|st)\.global\S*|cp\.async\.c\S*", done.asm["ptx"])))
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and stack bytes, as NVIDIA's cuobjdump reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "spilled": int(found[2])}


def all_kernels() -> list[dict[str, Any]]:
    launch = dict.fromkeys(("addresses", "grads", "numels"), I64) | dict.fromkeys(("decays", "factors", "scale"), F32)
    launch["blocks"] = "*i32"
    adamw_constants = {
        "BETA1": 0.9, "BETA2": 0.95, "EPS": 1e-8, "MASTER": tl.float32,
        "STATE": tl.float32, "GRAD": tl.bfloat16, "WEIGHT": tl.bfloat16, "HAS_WEIGHT": True, "ALIGN": 16,
        "EVEN": 8, "BLOCK": adamw.BLOCK,
    }  # fmt: skip
    elementwise = {"WIDE": tl.float32, "BLOCK": swiglu.BLOCK}
    backward = dict.fromkeys(("grad", "gate", "up", "d_gate", "d_up", "out"), BF16)
    lines = {"width": "i32*", "stride": "i32*", "blocks": "i32"}
    strides = {f"{x}_{along}": "i32*" for x in "qkv" for along in ("row", "at", "head")} | {
        "to_q_at": "i32*",
        "to_k_at": "i32*",
    }
    tables = dict.fromkeys(("q", "k", "v", "out_q", "out_k", "out_v"), BF16) | {"cos": F32, "sin": F32}
    rows = "residual", "grad", "second", "third", "x", "weight", "out"
    lengths = {"length": "i32*", "heads": "i32*", "kv_heads": "i32"}
    return [
        compiled(adamw.adamw_advance_kernel, {"step": F32, "factors": F32}, 1, LOG_BETA1=-0.1, LOG_BETA2=-0.05),
        compiled(adamw.adamw_kernel, {**launch, "pieces": "i32"}, adamw.WARPS, **adamw_constants),
        compiled(
            adamw.squares_kernel, {"grads": I64, "numels": I64, "blocks": "*i32", "sums": "*fp64"}, adamw.WARPS,
            GRAD=tl.bfloat16, ALIGN=16, EVEN=8, BLOCK=adamw.BLOCK, ROUNDS=adamw.ROUNDS,
        ),
        compiled(
            adamw.roots_kernel, {"sums": "*fp64", "ends": I64, "norms": "*fp64"}, adamw.WARPS, BLOCK=adamw.BLOCK,
        ),
        compiled(
            loss.cross_entropy_kernel,
            {"logits": BF16, "targets": I64, "losses": F32, "stride": "i32*"},
            loss.WARPS, WEIGHT=2.0**-15, VOCAB=32768, WIDE=tl.float32, BLOCK=loss.BLOCK,
        ),
        compiled(swiglu.swiglu_kernel, {"gate": BF16, "up": BF16, "out": BF16, **lines}, swiglu.WARPS, **elementwise),
        compiled(swiglu.swiglu_backward_kernel, {**backward, **lines}, swiglu.WARPS, AGAIN=True, **elementwise),
        *(
            compiled(
                norm.rms_norm_backward_kernel,
                {**dict.fromkeys(rows, BF16), "partials": F32, "rows": "i32*"},
                2048 // (32 * norm.BLOCK),
                GRADS=n, EPS=1e-5, ROUNDS=63, DIM=2048, WIDE=tl.float32, BLOCK=2048, STAGES=3,
            )
            for n in (1, 2, 3)
        ),
        compiled(
            ordered.ordered_sum_kernel, {"received": BF16, "own": BF16, "out": F32, "numel": "i32*"}, ordered.WARPS,
            RANKS=2, RANK=1, ADD=False, BLOCK=ordered.BLOCK,
        ),
        compiled(
            norm.column_sums_kernel, {"partials": F32, "out": BF16, "rows": "i32"}, 4,
            DIM=2048, ROUNDS=triton.cdiv(4 * 132, norm.ROWS), ROWS=norm.ROWS, COLUMNS=norm.COLUMNS,
        ),
        *(
            compiled(
                rope.rope_kernel, {**tables, **lengths, **strides}, rope.WARPS,
                SIGN=-1, HALF=64, LANES=64, HEADS=16, KV_HEADS=8, COPY=copy,
            )
            for copy in (False, True)
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    for each in all_kernels():
        print(json.dumps(each))
