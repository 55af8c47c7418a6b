"""The peak, clock, background load and profile are measured on the selected device.

The FLOP count is compared with PyTorch's counter. The grouping of kernels is tested with kernel names from a T4, an
A100 and an H100.
"""

import contextlib
import io
import json
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch
from conftest import load, made_up_gpu
from torch.utils.flop_counter import FlopCounterMode

from measure import attention, device, kernels, plots, records, roof, run

# ---- the measured peak


@pytest.mark.parametrize("script", ["baseline.py", "speedup_04_residual_init.py"])
def test_the_flops_of_a_token_are_those_that_pytorch_counts(script):
    module = load(script)
    config = module.GPTConfig(block_size=64, vocab_size=517, n_layer=3, n_head=2, n_embd=48)
    x = torch.randint(517, (2, 64))
    with FlopCounterMode(display=False) as counter:
        module.GPT(config)(x, x).backward()
    assert counter.get_total_flops() == records.flops_per_token(config, 64) * x.numel()


def test_a_peak_is_operations_over_seconds_in_the_best_of_three_rounds(monkeypatch):
    copies = []

    def seconds(stmt, *_, **names):  # the second of the three rounds is the best
        copies.extend([stmt] if "copy_" in stmt else [])
        return {1: 1.0, 2: 0.5, 3: 0.75}[len(copies) + ("copy_" not in stmt)]

    monkeypatch.setattr(roof, "seconds", seconds)
    config = SimpleNamespace(n_embd=32, vocab_size=100, n_layer=1)
    found = roof.measure(config, tokens=64, device=torch.device("cpu"))
    row = next(row for row in found["matmul"] if (row["precision"], row["name"]) == ("float32", "lm_head"))
    assert row["shape"] == (64, 32, 100) and row["tflops"] == pytest.approx(2 * 64 * 32 * 100 / 0.5 / 1e12, rel=1e-3)
    assert records.peaks(found)["float32"] == pytest.approx(2 * 2048**3 / 0.5 / 1e12, rel=1e-3)  # 2048-cubed matmul
    assert found["copy_gb_per_s"] == pytest.approx(2 * 2**28 / 0.5 / 1e9, rel=1e-3)  # each byte is read and written


def test_a_statement_is_timed_with_the_gpu_waited_for_that_it_runs_on(monkeypatch):
    events = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(str(device)))
    monkeypatch.setattr(device.time, "perf_counter", lambda: events.append("clock") or 0.25 * len(events))
    assert device.seconds("work()", torch.device("cuda:1"), work=lambda: None) > 0
    assert events[0::2] == ["cuda:1"] * (len(events) // 2) and events[1::2] == ["clock"] * (len(events) // 2)


def test_the_roof_has_as_many_threads_as_the_scripts():
    seen, threads = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        device.seconds("seen.append(threads())", torch.device("cpu"), seen=seen, threads=torch.get_num_threads)
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {2}


@pytest.mark.parametrize(
    "capability, found",
    [
        ((6, 0), ["float32"]),  # P100
        ((7, 5), ["float32", "fp16"]),  # T4
        ((8, 0), ["float32", "fp16", "tf32", "bf16"]),  # A100
        ((9, 0), ["float32", "fp16", "tf32", "bf16", "fp8"]),  # H100
    ],
)
def test_a_gpu_is_measured_in_the_types_that_it_multiplies_in_and_in_no_emulated_one(capability, found, monkeypatch):
    cuda, said = torch.device("cuda"), io.StringIO()
    with made_up_gpu(None, capability), contextlib.redirect_stdout(said):
        assert roof.precisions(cuda) == found
        assert "bf16" not in roof.precisions(torch.device("mps"))  # rung 03 does not use bf16 on MPS
        monkeypatch.setattr(attention, "ATTENTION", {})
        monkeypatch.setattr("sys.argv", ["attention.py", "--seq-lens", "8"])
        attention.main()
        import checkpoint
        import hellaswag

        monkeypatch.setattr(hellaswag, "read_examples", lambda path: [])
        monkeypatch.setattr(checkpoint, "load_model", lambda source, device: torch.nn.Linear(1, 1))
        monkeypatch.setattr(hellaswag, "count_right", lambda *_: (torch.is_autocast_enabled("cpu"), 0, 1))
        monkeypatch.setattr("sys.argv", ["hellaswag.py", "model"])
        hellaswag.main()
    assert ("| bf16 |" in said.getvalue()) == ("| acc 1.0000 |" in said.getvalue()) == ("bf16" in found)
    assert ("| fp16 |" in said.getvalue()) == ("fp16" in found and "bf16" not in found)


def test_the_machine_is_described_with_all_its_memory():
    with made_up_gpu():
        found = device.describe(torch.device("cuda"))
    assert (found["name"], found["device_memory_gib"], found["capability"]) == ("Made Up GPU", 80.0, "9.0")
    assert set(run.SAME_HOST) < set(found)


@pytest.fixture
def nvml(monkeypatch):
    """Make NVML report two GPUs at 1234 MHz and the returned `processes`. The second GPU's UUID is GPU-1234-5678."""
    state = SimpleNamespace(processes=[], used=2**30)
    for name, value in (
        ("nvmlInit", lambda: None),
        ("nvmlDeviceGetCount", lambda: 2),
        ("nvmlDeviceGetHandleByIndex", lambda index: ("GPU-0000-0000", "GPU-1234-5678")[index]),
        ("nvmlDeviceGetUUID", lambda gpu: gpu),
        ("nvmlDeviceGetClockInfo", lambda gpu, kind: {pynvml.NVML_CLOCK_SM: 1234}[kind]),
        ("nvmlDeviceGetPowerUsage", lambda gpu: 456_789),
        ("nvmlDeviceGetEnforcedPowerLimit", lambda gpu: 700_000),
        ("nvmlDeviceGetComputeRunningProcesses", lambda gpu: state.processes),
        ("nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(used=state.used)),
    ):
        monkeypatch.setattr(pynvml, name, value)

    def temperature(gpu, sensor):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", temperature)
    return state


def test_clock_and_power_are_read_from_the_measured_gpu(nvml):
    with made_up_gpu():
        gpu = device.find_gpu(device.describe(torch.device("cuda"))["uuid"])
    assert gpu == "GPU-1234-5678" and device.find_gpu(None) is None
    # MIG instances share one GPU's clock, so clock and power are not recorded for a MIG instance.
    assert device.find_gpu("of-a-MIG-slice") is None
    assert device.reading(gpu) == {"clock_mhz": 1234, "power_w": 457, "power_limit_w": 700, "temperature_c": None}
    assert device.reading(None) == {}


def test_other_work_is_noticed_on_the_cpu_and_on_the_gpu(nvml, monkeypatch):
    work = SimpleNamespace(cpu=3.0)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: work.cpu)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    assert device.load("GPU-1234-5678") is None
    nvml.processes.append("another")
    assert device.load("GPU-1234-5678") == "other processes use the GPU: 1"
    assert device.load(None) is None
    work.cpu, nvml.used = 10.0, 5 * 2**30
    said = "other programs use 1.6 CPU cores; other processes use the GPU: 1; 5 GiB of GPU memory is in use"
    assert device.load("GPU-1234-5678") == said


def test_the_tf32_peak_is_not_measured_in_float32(monkeypatch):
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="plain float32"):  # a CPU multiplies in float32 instead of TF32
        roof.multiply("tf32", (16, 16, 16), cpu)
    # A matmul that rounds its input, as a TF32 matmul does, is accepted.
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: torch.mm(x.bfloat16().float(), y))
    monkeypatch.setattr(roof, "seconds", lambda *args, **names: 0.5)
    assert roof.multiply("tf32", (16, 16, 16), cpu) > 0
    torch.set_float32_matmul_precision("highest")


def test_the_peak_of_a_gpu_is_measured_after_it_has_worked(monkeypatch, nvml):
    events = []
    monkeypatch.setattr(roof, "warm_up", lambda device: events.append("warm") or {"clock_mhz": 1234})
    monkeypatch.setattr(roof, "precisions", lambda device: ["float32"])
    monkeypatch.setattr(roof, "seconds", lambda *args, **names: events.append("time") or 0.5)
    config = SimpleNamespace(n_embd=32, vocab_size=100, n_layer=1)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.empty(1).expand(shape))
    monkeypatch.setattr(torch, "empty_like", lambda tensor: tensor)
    with made_up_gpu():
        found = roof.measure(config, tokens=64, device=torch.device("cuda"))
    assert events[0] == "warm" and events.count("warm") == 1
    assert found["gpu"]["clock_mhz"] == 1234


# ---- the breakdown of the step time


def span(name, start, length, category="cpu_op", **args):
    return {"ph": "X", "name": name, "ts": start, "dur": length, "tid": 1, "cat": category, "args": args}


def test_operations_of_a_cpu_are_grouped_by_the_time_spent_in_themselves():
    step = [
        span("ProfilerStep#5", 0, 10_000, "user_annotation"),
        span("aten::linear", 1000, 3000),
        span("aten::addmm", 1500, 2000),
        span("aten::bmm", 4000, 500),
        span("aten::_log_softmax", 4500, 500),
        span("aten::gelu", 5000, 250),
        span("aten::copy_", 5250, 250),
        span("graph_0_cpp_fused__to_copy_add_native_layer_norm_2", 5500, 500),
        span("Optimizer.step#AdamW.step", 8000, 1500, "user_annotation"),
        span("aten::mul_", 8500, 500),
        span("aten::mm", 20_000, 5000),  # after the last step: not counted
    ]
    assert kernels.grouped(*kernels.in_steps(step)) == {
        "matmul": 2.0,
        "attention": 0.5,
        "softmax and loss": 0.5,
        "normalisation and element-wise": 0.25 + 0.5 + 1.0,  # 1.0 is the self time of aten::linear
        "optimizer": 1.5,
        "copies": 0.25,
        "idle": 10 - 0.5 - 0.5 - 2 - 1 - 1.5 - 0.25 - 0.5 - 0.25,
    }


def test_kernels_of_a_gpu_are_grouped_by_their_name_and_by_what_launched_them():
    gemm = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
    launches = ["aten::mm", "aten::bmm", "aten::_softmax", "aten::copy_", "aten::gelu", "aten::_foreach_mul_"]
    events = [span(f"ProfilerStep#{n}", 10_000 * n, 10_000, "user_annotation") for n in (0, 1)]
    events += [span(name, 100 * i, 50, **{"External id": i}) for i, name in enumerate(launches)]
    kernel = [
        (gemm, 1000, 0),
        (gemm, 200, 1),  # the same kernel, launched by attention
        ("void cunn_SoftMaxForward", 300, 2),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", 400, 3),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", 500, 4),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 600, 5),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", 700, None),
        ("triton_per_fused__to_copy_native_layer_norm_4", 800, None),
        ("triton_poi_fused__to_copy_1", 900, None),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", 1100, None),
    ]
    start = 2000
    for name, length, external in kernel:
        events.append(
            span(name, start, length, "kernel", **({"External id": external} if external is not None else {}))
        )
        start += length
    events.append(span("Memcpy HtoD (Pinned -> Device)", 19_000, 50, "gpu_memcpy"))
    events.append(span("ProfilerStep#1", 10_000, 3_000, "gpu_user_annotation"))  # not a third step
    found = kernels.grouped(*kernels.in_steps(events))
    assert found == {  # ms per step, averaged over two steps
        "matmul": 0.5,
        "attention": 0.65,
        "softmax and loss": 0.5,
        "normalisation and element-wise": 0.65,
        "optimizer": 0.3,
        "copies": 0.675,
        "idle": 10 - 3.275,
    }


# Kernel names from public traces of a T4, an A100 and an H100, and names that Inductor generates.
NAMES = {
    "matmul": """nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_stages_32x1_tn
        cutlass::Kernel2<cutlass_80_tensorop_s1688_128x256> cublasLt::splitKreduce_kernel<32> triton_tem_fused_mm_3
        triton_tem_fused__to_copy_addmm_gelu_2 aten::mm aten::addmm aten::_addmm_activation aten::_scaled_mm""",
    "attention": """cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7 fmha_cutlassF_f16_aligned_sm75
        pytorch_flash::flash_fwd_kernel<64> triton_tem_fused_flex_attention_0 aten::bmm
        aten::_scaled_dot_product_cudnn_attention_backward""",
    "softmax and loss": """triton_red_fused__log_softmax__to_copy_prepare_softmax_online_2 cunn_SoftMaxForward<4,float>
        triton_red_fused__log_softmax_backward_data_nll_loss_backward_nll_loss_forward_1
        at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>""",
    "normalisation and element-wise": """triton_per_fused__to_copy_add_native_layer_norm_4
        triton_poi_fused__to_copy_gelu_view_7 at::native::vectorized_layer_norm_kernel<float>""",
    "optimizer": "at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>> at::native::lpnorm_cleanup<float>",
    "copies": """MemcpyHtoD(Pinned->Device) triton_poi_fused__to_copy_1 triton_poi_fused__to_copy_t_3
        at::native::elementwise_kernel<at::native::direct_copy_kernel_cuda>""",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_kernel_is_in_its_group(kind):
    for name in NAMES[kind].split():
        assert kernels.group(name) == kind, name


@pytest.mark.parametrize(
    "names, ran",
    [
        (["aten::_scaled_dot_product_flash_attention", "void pytorch_flash::flash_fwd_kernel<64>"], "flash"),
        ([NAMES["attention"].split()[0]], "cuDNN"),  # the profile of a CUDA graph lists kernels but no operations
        (["aten::_efficient_attention_forward", "fmha_cutlassF_f16_aligned_64x64_rf_sm75"], "memory-efficient"),
        (["aten::_scaled_dot_product_attention_math", "aten::bmm"], "math"),
        (["aten::bmm", "aten::_softmax"], "written out"),
    ],
)
def test_the_attention_kernel_is_named(names, ran):
    assert kernels.attention(names) == ran


def test_a_gpu_trace_without_kernels_is_not_a_profile():
    step = [span("ProfilerStep#5", 0, 10_000, "user_annotation"), span("aten::mm", 1000, 2000)]
    with pytest.raises(ValueError, match="recorded no kernels"):
        kernels.grouped(*kernels.in_steps(step), gpu=True)


def test_kernels_that_overlap_leave_the_gpu_idle_as_long_as_none_runs():
    step = [span("ProfilerStep#5", 0, 10_000, "user_annotation")]
    for start, end in ((1000, 4000), (2000, 3000), (3500, 5000), (8000, 9000)):
        step.append(span("gemm", start, end - start, "kernel"))
    assert kernels.grouped(*kernels.in_steps(step))["idle"] == 5.0


@pytest.mark.slow
def test_the_time_of_a_real_step_is_all_there(tmp_path):
    words = "-m measure.kernels baseline.py --device cpu --steps", run.PROFILED_STEPS
    printed, errors, status = run.execute(" ".join(map(str, words)).split(), tmp_path)
    assert status == 0, errors
    groups = json.loads(printed.splitlines()[-1])["groups_ms"]
    printed = records.parse(printed)["step_ms"][5:8]
    assert min(printed) / 1.25 < sum(groups.values()) < 1.25 * max(printed)
    assert groups["idle"] < sum(groups.values()) / 5
    assert min(groups[kind] for kind in ("matmul", "softmax and loss", "optimizer", "attention")) > 0
    assert list(groups) == list(plots.GROUPS)
