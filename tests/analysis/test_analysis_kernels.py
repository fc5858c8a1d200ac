"""A step's time by kernel family: known traces, and a real one."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis import kernels
from analysis.__main__ import main
from tests.helpers import TINY, points, train


def event(name: str, start: float, duration: float, cat: str = "kernel", tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": tid}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused__fused_rms_norm__to_copy_mul_0", "norm"),
        ("triton_poi_fused_mul_silu_1", "elementwise"),
        ("ordered_sum_kernel", "elementwise"),
        ("triton_red_fused__log_softmax_nll_loss_forward_2", "loss"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::mm", "matmul"),
        ("autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0", "autograd"),
        ("triton_poi_fused__to_copy_add_cat_mul_neg_slice_transpose_unsqueeze_2", "elementwise"),  # rotation
        ("triton_poi_fused__to_copy__unsafe_view_add_cat_mul_split_sub_unsqueeze_view_1", "elementwise"),
        ("triton_red_fused__fused_rms_norm_add_0", "norm"),
        ("rms_norm_backward_kernel", "norm"),
        ("column_sums_kernel", "norm"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_2", "elementwise"),
        ("triton_poi_fused_all_gather_into_tensor_cat_1", "elementwise"),
        ("triton_tem_fused_mm_0", "matmul"),
        ("mfu_sweep::turn_rows", "elementwise"),
        ("mfu_sweep::rms_norm_backward", "norm"),
        ("squares_kernel", "optimizer"),
        ("roots_kernel", "optimizer"),
        (
            "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32u>",
            "norm",
        ),
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_silu_t_view_19", "elementwise"),  # a cast to fp8
        ("triton_poi_fused__fused_rms_norm__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::Ten", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIter", "copy"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, std::a", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<at::native::(anonymo", "copy"),
        ("Memset (Device)", "copy"),
        ("aten::copy_", "copy"),
        (
            "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void*, void*",
            "attention",
        ),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned int", "attention"),
        ("void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*", "elementwise"),
        ("void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*", "elementwise"),
        ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail", "elementwise"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long", "elementwise"),
        ("void at::native::lpnorm_cleanup<c10::BFloat16, (at::native::NormType)1, double, true, double>", "optimizer"),
        ("my_kernel", "other"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert kernels.family(name) == family


def test_every_instant_counts_once_and_hidden_communication_not_at_all() -> None:
    spent = kernels.breakdown(
        [
            event("nvjet_a", 0, 100),
            event("ncclDevKernel_SendRecv", 50, 100, tid=9),  # 50 of it behind the matmul, 50 alone
            event("Memcpy DtoD", 140, 30, tid=8),  # 10 behind communication, 20 alone
            event("triton_poi_fused_add", 200, 40),
            event("aten::mm", 0, 1000, cat="cpu_op"),  # the host's side of a GPU trace doesn't count
        ]
    )
    expected = {"matmul": 100e-6, "communication": 50e-6, "copy": 20e-6, "elementwise": 40e-6, "idle": 30e-6}
    assert {k: v for k, v in spent.items() if v} == pytest.approx(expected)
    assert sum(spent.values()) == pytest.approx(240e-6)


def test_kernels_of_one_family_beside_each_other_count_once() -> None:
    spent = kernels.breakdown([event("nvjet_a", 0, 100), event("nvjet_b", 20, 100, tid=8), event("nvjet_c", 30, 10)])
    assert spent["matmul"] == pytest.approx(120e-6)
    assert spent["idle"] == pytest.approx(0)


def test_cpu_operators_count_where_they_are_innermost() -> None:
    spent = kernels.breakdown(
        [
            event("aten::linear", 0, 100, cat="cpu_op"),
            event("aten::mm", 10, 80, cat="cpu_op"),
            event("aten::silu", 120, 10, cat="cpu_op"),
            event("gloo:all_reduce", 95, 30, cat="user_annotation", tid=3),
        ]
    )
    used = {k: v for k, v in spent.items() if v > 1e-12}
    assert used == pytest.approx({"matmul": 80e-6, "elementwise": 30e-6, "communication": 20e-6})


def test_no_events() -> None:
    assert kernels.breakdown([]) == {}
    assert kernels.breakdown([{"ph": "M", "name": "process_name"}]) == {}


@pytest.mark.slow
def test_a_real_trace_adds_up_to_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = train(*TINY, "steps=6", "profile=true", "reduction=zero2", "name=traced", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "outputs" / "traced"
    assert main(["kernels", str(sweep), "--format", "csv"]) == 0
    header, row = (line.split(",") for line in capsys.readouterr().out.splitlines())
    cells = dict(zip(header, row, strict=True))
    spent = {k: float(v.split()[0]) for k, v in cells.items() if re.match(r"[\d.]+ \(", v)}
    assert sum(spent.values()) == pytest.approx(float(cells["step ms"]), abs=0.1)
    assert spent["matmul"] > 0 and spent["communication"] > 0 and spent["optimizer"] > 0
    (point,) = points(sweep).values()
    lines = [json.loads(line) for line in (point / "metrics.jsonl").read_text().splitlines()]
    recorded = 1e3 * sum(line["time/step"] for line in lines[-2:]) / 2
    assert 0.5 * recorded < float(cells["step ms"]) < 1.5 * recorded


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = tmp_path / "sweep" / "p-12345678"
    (point / "traces").mkdir(parents=True)
    (point / "status.json").write_text("{}")
    assert main(["kernels", str(tmp_path / "sweep")]) == 2
    assert "no trace of rank 0" in capsys.readouterr().err
    for damage in (b"no gzip", gzip.compress(b"{"), gzip.compress(b"[1]"), gzip.compress(b"{}")[:-4]):
        (point / "traces" / "rank0.json.gz").write_bytes(damage)
        assert main(["kernels", str(tmp_path / "sweep")]) == 2
        assert "not a trace" in capsys.readouterr().err
