"""Peak, clock, load, profile and attention table are measured on the selected device, in the stated units."""

import itertools
import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from conftest import made_up_gpu, play, run_guard

from measure import attention, counts, device, kernels, roof, run

# ---- the measured peak


def test_a_peak_is_of_the_named_precision_and_shape_the_best_of_three_rounds_after_warming_up(monkeypatch, capsys):
    def seconds(stmt, where, **names):
        took = (1.0, 0.5, 0.75)[len(copied)]
        if "target" in names:
            copied.append(names["source"].nbytes)
            return took
        eval(stmt, names)
        return took

    def multiplied(x, w, *scales, **options):
        n = w.size(1) if scales else w.size(0)
        ran.append((torch.get_float32_matmul_precision(), x.dtype, w.dtype, (*x.shape, n)))
        assert x[0, 0] == w[0, 0] == 0.5  # from torch.randn, because a kernel can run faster on zeros
        assert options == ({"out_dtype": torch.bfloat16, "use_fast_accum": True} if scales else {})

    settings = {"float32": ("highest", torch.float32), "fp16": ("highest", torch.float16)}
    settings |= {"tf32": ("high", torch.float32), "bf16": ("highest", torch.bfloat16)}
    settings |= {"fp8": ("highest", torch.float8_e4m3fn)}
    ran, copied, clock = [], [], itertools.count(0, 4)
    for owner, name, value in (
        (roof, "MODELS", {"gpt2": None, "own": SimpleNamespace(n_embd=48, vocab_size=105)}),
        (roof, "check_tf32", lambda device: None),
        (roof, "find_gpu", {"1234-5678": "its handle"}.get),
        (roof, "reading", lambda gpu: events.append(gpu) or {"clock_mhz": 1234}),
        (roof, "time", SimpleNamespace(perf_counter=lambda: next(clock))),
        (roof, "seconds", seconds),
        (torch.Tensor, "__matmul__", lambda x, y: ran or events.append(x.dtype)),
        (torch, "randn", lambda *shape, device, dtype=None: torch.tensor(0.5, dtype=dtype).expand(shape)),
        (torch, "empty_like", lambda tensor: tensor),
        (F, "linear", multiplied),
        (torch, "_scaled_mm", multiplied),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr("sys.argv", "roof.py --model own --batch-size 3 --seq-len 20 --device cuda".split())
    with made_up_gpu() as events:
        run_guard("measure/roof.py")
    assert events == 2 * [*50 * [torch.bfloat16], "its handle", "synchronize"]  # 12 seconds
    found, expected = json.loads(capsys.readouterr().out), []
    shapes = {"attn.c_attn": (60, 48, 144), "attn.c_proj": (60, 48, 48), "mlp.c_fc": (60, 48, 192)}
    shapes |= {"mlp.c_proj": (60, 192, 48), "lm_head": (60, 48, 105), "square": (8192, 8192, 8192)}
    for row, (precision, name) in zip(found["matmul"], itertools.product(settings, shapes), strict=True):
        (setting, dtype), (m, k, n) = settings[precision], shapes[name]
        assert (row["precision"], row["name"], row["shape"]) == (precision, name, [m, k, n])
        n = 96 if (precision, n) == ("fp8", 105) else n  # fp8 multiplies only multiples of 16
        assert row["tflops"] == pytest.approx(2 * m * k * n / 0.5e12, rel=1e-3)
        expected.append((setting, dtype, dtype, (m, k, n)))
    assert ran == 3 * expected and found["gpu"] == {"clock_mhz": 1234}
    assert copied == 3 * [2**28] and found["copy_gb_per_s"] == pytest.approx(2 * 2**28 / 0.5e9, rel=1e-3)


def test_the_tf32_peak_is_not_measured_in_float32(monkeypatch):
    with pytest.raises(RuntimeError, match="plain float32"):  # a CPU multiplies in float32 instead of TF32
        roof.multiply("tf32", (16, 16, 16), torch.device("cpu"))
    # A matmul that rounds its input, as a TF32 matmul does, is accepted.
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: torch.mm(x.bfloat16().float(), y))
    monkeypatch.setattr(roof, "seconds", lambda *args, **names: 0.5)
    assert roof.multiply("tf32", (16, 16, 16), torch.device("cpu")) > 0
    torch.set_float32_matmul_precision("highest")
    for capability, expected in ((6, 0), ["float32"]), ((7, 5), ["float32", "fp16"]):  # bf16 would be emulated
        with made_up_gpu(None, capability):
            assert device.precisions(torch.device("cuda")) == expected


def test_a_time_is_the_median_of_runs_that_wait_for_their_gpu_and_use_the_threads_of_the_scripts(monkeypatch):
    events, threads, now, durations = [], torch.get_num_threads(), [0.0], itertools.cycle([1.0, 7.0, 2.0])

    def work():
        now[0] += next(durations)
        assert torch.get_num_threads() == 2

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(str(device)))
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or now[0]))
    torch.set_num_threads(2)
    try:
        assert device.seconds("work()", torch.device("cuda:1"), 40, work=work) == 2.0
    finally:
        torch.set_num_threads(threads)
    assert events == ["cuda:1", "clock"] * (len(events) // 2) and now[0] > 40


# ---- the machine


def test_memory_is_in_gib_clock_in_mhz_and_power_in_watts_of_the_gpu_and_other_work_is_noticed(monkeypatch, capsys):
    work, names = SimpleNamespace(cpu=3.0, processes=[], used=2**30), ["GPU-0", "GPU-1234-5678"]
    nvml = {"Init": lambda: None, "DeviceGetCount": lambda: 2, "DeviceGetHandleByIndex": lambda index: index}
    nvml |= {"DeviceGetUUID": names.__getitem__, "DeviceGetClockInfo": lambda gpu, kind: {(1, "sm"): 1234}[gpu, kind]}
    nvml |= {"DeviceGetPowerUsage": lambda gpu: 456_789, "DeviceGetEnforcedPowerLimit": lambda gpu: 700_000}
    nvml |= {"DeviceGetTemperature": lambda *_: {}["not supported"], "DeviceGetMaxClockInfo": lambda *_: 1980}
    nvml |= {"DeviceGetComputeRunningProcesses": lambda gpu: work.processes}
    nvml |= {"DeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=work.used)}
    nvml = {f"nvml{name}": call for name, call in nvml.items()} | {"NVML_CLOCK_SM": "sm", "NVML_TEMPERATURE_GPU": 0}
    monkeypatch.setattr(device, "pynvml", SimpleNamespace(NVMLError=KeyError, **nvml))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=48 * 2**30))
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: work.cpu)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    monkeypatch.setattr("sys.argv", "device.py --device cuda".split())
    with made_up_gpu():
        run_guard("measure/device.py")
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["device_memory_gib"], found["capability"]) == ("Made Up GPU", 80.0, "9.0")
    assert found["memory_gib"] == 48.0 and set(run.SAME_HOST) < set(found)
    # MIG instances share one GPU's clock, so clock and power are not recorded for a MIG instance.
    assert [device.find_gpu(uuid) for uuid in (found["uuid"], None, "of-a-MIG-slice")] == [1, None, None]
    assert device.reading(1) == {"clock_mhz": 1234, "power_w": 457, "power_limit_w": 700, "temperature_c": None}
    assert device.load(1) is None
    work.processes.append("another")
    assert device.load(1) == "other processes use the GPU: 1" and device.load(None) is None
    work.cpu, work.used = 10.0, 20 * 2**30
    said = "other programs use 1.6 CPU cores; other processes use the GPU: 1; 20 GiB of GPU memory is in use"
    assert device.load(1) == said


# ---- the breakdown of the step time


def span(name, start, length, category="cpu_op", **args):
    return {"ph": "X", "name": name, "ts": start, "dur": length, "tid": 1, "cat": category, "args": args}


def test_kernels_of_a_cpu_are_the_operations_that_compute_each_with_those_that_it_calls():
    trace = [span("ProfilerStep#5", 0, 10_000, "user_annotation"), span("aten::linear", 1000, 3000)]
    trace += [span("aten::addmm", 1500, 2000), span("aten::view", 1510, 5), span("aten::bmm", 4000, 500)]
    trace += [span("aten::_log_softmax", 4500, 500), span("aten::gelu", 5000, 250), span("aten::t", 5250, 9)]
    trace += [span("aten::to", 5260, 300), span("aten::_to_copy", 5270, 250), span("aten::copy_", 5280, 230)]
    trace += [
        span("aten::masked_fill", 5600, 250),
        span("aten::clone", 5600, 100),
        span("aten::masked_fill_", 5700, 150),
    ]
    trace += [span("graph_0_cpp_fused__to_copy_add_native_layer_norm_2", 6000, 500), span("MmBackward0", 6500, 600)]
    trace += [span("Optimizer.step#AdamW.step", 8000, 1500, "user_annotation"), span("aten::mul_", 8500, 500)]
    trace += [span("ProfilerStep#6", 10_000, 6_000, "user_annotation"), span("aten::mm", 11_000, 1000)]
    trace += [span("ProfilerStep#7", 16_000, 14_000, "user_annotation"), span("aten::mm", 29_500, 1000)]
    trace += [span("aten::mm", -500, 400), span("aten::mm", 31_000, 5000)]  # outside of the steps: not counted
    steps = kernels.in_steps(trace)
    total = {"matmul": 4.0, "attention": 0.5, "softmax and loss": 0.5, "optimizer": 0.5, "copies": 0.35}
    total |= {"normalization and element-wise": 0.25 + 0.15 + 0.5, "idle": (10 - 4.75) + (6 - 1) + (14 - 1)}
    assert kernels.grouped(steps) == {kind: pytest.approx(ms / 3, abs=1e-4) for kind, ms in total.items()}
    step = kernels.median_step(steps)  # of 10, 6 and 14 ms
    shown = [(start, duration, *step["names"][name]) for start, duration, name in step["kernels"]]
    assert (
        step["ms"] == 10
        and shown[0] == (1500, 2000, "matmul", "addmm")
        and shown[-1] == (8500, 500, "optimizer", "mul_")
    )
    names = "addmm bmm _log_softmax gelu _to_copy clone masked_fill_ graph_0_cpp_fused__to_copy_add_native_layer_norm_2"
    assert [name for *_, name in shown] == [*names.split(), "mul_"]


def test_a_profile_is_of_three_steps_of_a_gpu_grouped_by_kernel_and_by_what_launched_it(monkeypatch):
    class Profiler(ExitStack):
        def __init__(self, schedule, on_trace_ready):
            super().__init__()
            self.callback(on_trace_ready, self)
            self.step_num, recorded[:] = 0, [n for n in range(20) if schedule(n).name.startswith("RECORD")]

        def step(self):
            events.append("step")
            self.step_num += 1

        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps({"traceEvents": trace}))

    def train():
        for _ in range(8):
            hooks[-1](SimpleNamespace(param_groups=[{"params": [SimpleNamespace(device=torch.device("cuda:1"))]}]))

    recorded, hooks = [], []
    monkeypatch.setattr(kernels, "register_optimizer_step_post_hook", lambda f: nullcontext(hooks.append(f)))
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: {"cuda:1": 5 * 2**29}[str(device)])
    monkeypatch.setattr("sys.argv", ["baseline.py"])
    trace = [span("ProfilerStep#5", 50_000, 10_000, "user_annotation")]
    trace += [span("ProfilerStep#6", 60_000, 12_000, "user_annotation")]
    trace += [span("ProfilerStep#7", 72_000, 8_000, "user_annotation")]
    trace += [span("ProfilerStep#6", 60_000, 3_000, "gpu_user_annotation")]  # not a fourth step
    launches = ["aten::mm", "aten::bmm", "aten::_softmax", "aten::copy_", "aten::gelu", "aten::_foreach_mul_"]
    trace += [span(name, 50_000 + 100 * i, 50, **{"External id": i}) for i, name in enumerate(launches)]
    elementwise, sdpa = "vectorized_elementwise_kernel<4>", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"
    with made_up_gpu() as events:
        with pytest.raises(ValueError, match="recorded no kernels"):
            kernels.profile(train)
        for name, start, end, launched in (
            ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", 0, 1000, None),
            ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 1000, 1100, 1),  # launched by attention
            ("void cublasLt::splitKreduce_kernel<32, float>(float*)", 1100, 1200, 1),
            ("void cunn_SoftMaxForward", 1200, 1500, 2),
            ("direct_copy_kernel_cuda", 1500, 1900, 3),
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::F<std::array<char*, 2>>>(int)",
                1900,
                2400,
                4,
            ),
            (elementwise, 2400, 3000, 5),
            ("triton_red_fused__log_softmax_nll_loss_forward_3", 3000, 3700, None),
            ("triton_per_fused__to_copy_native_layer_norm_4", 3700, 4500, None),
            ("triton_poi_fused__to_copy_1", 4500, 5450, None),
            (sdpa, 5450, 6450, None),
            ("cublasLt::splitKreduce_kernel<32>", 5550, 6050, None),  # these two are in another stream
            ("void cutlass::Kernel2<cutlass_80_tensorop_s1688_128x256>(Params)", 6200, 6500, None),
            ("triton_tem_fused_addmm_gelu_2", 6500, 6800, None),
            ("void fmha_cutlassF_f16_aligned_sm75", 6800, 7100, None),
            ("Memcpy HtoD (Pinned -> Device)", 27_000, 27_450, None),
        ):
            category = "gpu_memcpy" if "Memcpy" in name else "kernel"
            trace.append(span(name, 52_000 + start, end - start, category, **{"External id": launched}))
        del events[:]
        found = kernels.profile(train)
        assert events == 8 * ["synchronize", "step"] and recorded == [5, 6, 7]
    assert (found["attention"], found["reserved_gib"]) == ("cuDNN", 2.5)
    expected = {"matmul": 0.7, "attention": 0.5, "softmax and loss": 1 / 3, "normalization and element-wise": 1.3 / 3}
    expected |= {"optimizer": 0.2, "copies": 0.6, "idle": 10 - (7.1 + 0.45) / 3}  # ms per step
    assert found["groups_ms"] == pytest.approx(expected, abs=1e-4)
    step = found["step"]  # the first one, which is of median length
    assert step["ms"] == 10 and step["kernels"][2] == [3100, 100, 2] and len(step["kernels"]) == 15
    shown = [step["names"][name][1] for *_, name in step["kernels"]]
    last = [kernels.short(trace[-1]["name"])]  # in another step
    assert shown[:4] == [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        "bmm sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "+ bmm cublasLt::splitKreduce_kernel",
        "_softmax cunn_SoftMaxForward",
    ]
    assert shown[4:6] == ["copy_ direct_copy_kernel_cuda", "gelu vectorized_elementwise_kernel"]
    assert {"cutlass_80_tensorop_s1688_128x256", "triton_poi_fused__to_copy_1", "Memcpy HtoD"} < {*shown, *last}
    names = "flash::flash_fwd_kernel", "fmha_cutlassF_f16_sm75", "aten::_scaled_dot_product_attention_math", "aten::bmm"
    assert kernels.attention(["flash::flash_fwd_kernel", "aten::_scaled_dot_product_cudnn_attention"]) == "cuDNN"
    assert [kernels.attention([name]) for name in names] == ["flash", "memory-efficient", "math", "written out"]


# ---- the table of attention kernels


def test_the_attention_table_shows_the_times_peaks_and_speed_ups_of_what_its_options_name(monkeypatch):
    def attend(q, k, v):
        seen.add((q.dtype, q.shape, k.shape, v.shape))
        return q + k + v

    def seconds(stmt, where, least, f):
        gradients = eval(stmt, {"f": f})
        assert len(gradients) == 3 if isinstance(gradients, tuple) else not gradients.requires_grad
        return next(ms) / 1000

    seen, peaks = set(), itertools.cycle([3 * 2**20, 2**19])
    ms = itertools.cycle([3, 9, 0.5, 6, 1, 10, 0.25, 4, 2, 8, 0.4, 5])  # three rounds: both passes of both kernels
    monkeypatch.setattr(attention, "ATTENTION", {"written out": attend, "math": attend, "flash": torch.baddbmm})
    monkeypatch.setattr(attention, "peak_bytes", lambda function, device: next(peaks))
    monkeypatch.setattr(attention, "seconds", seconds)
    options = "--seq-lens", 8, 16, "--batch-size", 2, "--heads", 3, "--head-size", 4
    printed = play("measure/attention.py", *options, "--dtype", "fp16")
    assert seen == {(torch.float16, *3 * [(2, 3, T, 4)]) for T in (8, 16)} and "| fp16 | B 2, 3 heads of 4" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    rows = ["written out 3.0 2.000 (1.000-3.000) 1.00 x 9.000 (8.000-10.000) 1.00 x"]
    rows += ["math 0.5 0.400 (0.250-0.500) 5.00 x 5.000 (4.000-6.000) 1.80 x", "flash kernel not available"]
    heading = "MiB forward, ms forward, speed-up both passes, ms both passes, speed-up"
    assert lines[1:] == ["", "T 8", heading, *rows, "", "T 16", heading, *rows]


def test_the_peak_of_an_attention_kernel_does_not_include_the_one_before(monkeypatch):
    memory = SimpleNamespace(now=5, peak=50)
    module = SimpleNamespace(
        memory_allocated=lambda device: memory.now, max_memory_allocated=lambda device: memory.peak
    )
    module.reset_peak_memory_stats = lambda device: setattr(memory, "peak", memory.now)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert attention.peak_bytes(lambda: setattr(memory, "peak", max(memory.peak, 12)), torch.device("cuda")) == 12 - 5


def test_each_attention_kernel_is_causal_and_is_the_one_that_its_row_names():
    q, k, v = torch.randn(3, 2, 3, 8, 4)
    attention.written_out(q, k, v)  # builds the mask, which it keeps
    for kind in ("written out", "math", "flash"):
        with counts.Recorder() as recorder:
            found = attention.ATTENTION[kind](q, k, v)
        assert kind != "written out" or not any("tril" in kernel.name for kernel in recorder.kernels)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        assert any("flash" in kernel.name for kernel in recorder.kernels) == (kind == "flash")
