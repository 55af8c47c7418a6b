"""Run an unmodified script on fake tensors, which have shapes and lifetimes but no values.

Fake tensors need no GPU and almost no memory, so a laptop can run a step of GPT-2 XL on them. counts.py counts the
kernels of such a step, and memory.py adds up the sizes of its tensors.
"""

import contextlib
import functools
import io
import os
import pkgutil
import runpy
from unittest import mock

import torch
import torch._inductor.config
from commands import OVERRIDES
from record import ROOT
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _pop_mode_temporarily


def compiler(inner, fullgraph=True):
    """Return a replacement for torch.nn.Module.compile.

    `inner` compiles a graph, as Inductor's compile_fx_inner does. With `fullgraph`, code outside a graph is an error.
    """

    def compile(module, **_):
        backend = functools.partial(compile_fx, inner_compile=inner)
        call = torch.compile(module._call_impl, backend=backend, fullgraph=fullgraph, dynamic=False)

        def without_mode(*args, **kwargs):
            with _pop_mode_temporarily():  # Dynamo does not compile under an unknown dispatch mode
                return call(*args, **kwargs)

        module._compiled_call_impl = without_mode

    return compile


def run(script, flags, mode, compile, cuda=True, to=lambda module, device: module, environment=None):
    """Run `script` on fake tensors with the options in `flags`, a dict, and with the dispatch mode `mode` active.

    `script` may contain arguments, separated by spaces. `compile` and `to` replace the methods torch.nn.Module.compile
    and torch.nn.Module.to. `environment` contains more environment variables. The script runs on the CPU but follows
    PyTorch's rules for CUDA, or its rules for the CPU if `cuda` is False. Raises SystemExit if the script rejects an
    option.
    """
    softmax, from_numpy, fake = torch.nn.functional.softmax, torch.from_numpy, FakeTensorMode()
    capabilities = {**torch.cpu.get_capabilities(), "avx512_bf16": True}  # on a CPU, the rungs need this for bf16

    def in_float32(x, *args, **kwargs):
        return softmax(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    script, *words = script.split()
    words += [str(word) for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    patches = {
        "sys.argv": [script, *words, "--device", "cpu"],
        "sys.stdout": io.StringIO(),
        "torch.Tensor.__format__": lambda tensor, form: "",
        "torch.from_numpy": lambda array: fake.from_tensor(from_numpy(array)),
        "torch.nn.Module.to": to,
        "torch.nn.Module.compile": compile,
        "torch.use_deterministic_algorithms": lambda mode, warn_only=False: None,
    }
    if cuda:
        patches |= {
            "torch.cpu.get_capabilities": lambda: capabilities,
            "torch.nn.functional.softmax": in_float32,
            "torch.nn.utils.clip_grad._has_foreach_support": lambda tensors, device: True,
            "torch.optim.adam._default_to_fused_or_foreach": lambda *_, **__: (False, True),
        }
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # as in the rungs on a GPU; deterministic mode changes compiled kernels
    torch._dynamo.reset()
    try:
        with contextlib.ExitStack() as stack, mock.patch.dict(os.environ):
            for name in OVERRIDES:  # environment variables that could change the run
                os.environ.pop(name, None)
            os.environ.update(environment or {})
            for name, value in patches.items():
                owner, _, attribute = name.rpartition(".")
                stack.enter_context(mock.patch.object(pkgutil.resolve_name(owner), attribute, value))
            stack.enter_context(torch._dynamo.config.patch(disable=False))
            stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
            threshold = torch._inductor.config.score_fusion_memory_threshold  # chunked_loss.py sets it
            stack.enter_context(torch._inductor.config.patch(score_fusion_memory_threshold=threshold))
            stack.enter_context(fake)
            stack.enter_context(mode)
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        torch.use_deterministic_algorithms(deterministic)
