"""A GPU that is not there, for a process that only compiles: what Inductor and Triton ask of one, they are told.

Nothing runs. Kernels are compiled to cubins by the ptxas that comes with Triton, for each generation of GPUs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = (80, 90, 100)  # A100, H100, B200
H100 = {
    "name": "NVIDIA H100",
    "type": "cuda",
    "index": 0,
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
}


class Cubin(NamedTuple):
    kernel: str
    target: int
    registers: int
    spilled: int  # bytes of a thread that are in memory


class Program(NamedTuple):
    """What Inductor made of a function."""

    code: str
    cubins: list[Cubin]

    @property
    def launches(self) -> list[str]:
        return [line for line in self.call if ".run(" in line]

    @property
    def call(self) -> list[str]:
        """The lines that run, in order: those of a CUDA graph, or of a program that is none."""
        start = min(self.code.index(name) for name in ("def call(", "def partition_0(") if name in self.code)
        return [line.strip() for line in self.code[start : self.code.index("runner = Runner(")].splitlines()]


def compiled(work: Callable[[], Any], targets: tuple[int, ...] = TARGETS) -> Program:
    """What becomes of a compiled function that `work` calls, on fake tensors."""
    codes, cubins = list[str](), list[Cubin]()
    torch.compiler.reset()

    def precompile(tuner: Any, *args: Any, **kwargs: Any) -> None:
        for target in targets:
            tuner.device_props = tuner.device_props._replace(cc=target, major=target // 10)
            for config in tuner.configs:
                cubins.append(measured(tuner._precompile_config(config).kernel, tuner.fn.__name__, target))

    def write(source: str, *args: Any, **kwargs: Any) -> Any:
        codes.append(source)
        return as_it_was(source, *args, **kwargs)

    as_it_was = PyCodeCache.write
    triton_heuristics.CachingAutotuner.precompile = precompile
    triton_heuristics.CachingAutotuner.run = lambda *args, **kwargs: None
    PyCodeCache.write = write
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            work()
    except RuntimeError as error:
        if "driver" not in str(error):  # all is compiled, and now it would run
            raise
    finally:
        PyCodeCache.write = as_it_was
    (code,) = [code for code in codes if "def call(" in code]
    return Program(code, cubins)


def measured(kernel: Any, name: str, target: int) -> Cubin:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    return Cubin(name, target, numbers["REG"], numbers["STACK"] + numbers["LOCAL"])


def pretend() -> None:
    """For the rest of the process."""
    torch._C._ensureCUDADeviceGuardSet()
    properties = SimpleNamespace(**H100)
    cuda = dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0)
    cuda |= dict.fromkeys(("_lazy_init", "synchronize", "set_device", "manual_seed", "set_rng_state"))
    cuda |= {"is_available": True, "device_count": 1, "is_initialized": False, "get_rng_state": torch.get_rng_state()}
    cuda |= {"get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": H100["name"]}
    raw = {f"_cuda_{name}": 0 for name in ("getCurrentRawStream", "exchangeDevice", "maybeExchangeDevice", "getDevice")}
    raw |= {"_cuda_setDevice": None, "_accelerator_getDeviceIndex": 0}
    of_dynamo = dict.fromkeys(("get_raw_stream", "exchange_device", "maybe_exchange_device", "current_device"), 0)
    of_dynamo |= {"device_count": 1, "is_available": True, "get_compute_capability": 90, "synchronize": None}
    of_dynamo |= {"get_device_properties": properties}
    worker = {"get_device_properties": properties, "current_device": 0}
    not_to_run = {"lazy_init": None}  # they try patterns out
    for owner, answers in (
        (torch.cuda, cuda),
        (torch._C, raw),
        (torch.accelerator, {"current_device_index": 0, "is_available": False}),
        (CudaInterface, of_dynamo),
        (CudaInterface.Worker, worker),
        (joint_graph, not_to_run | {"_sfdp_init": None}),
        (post_grad, not_to_run),
        (triton_helpers, {"set_driver_to_gpu": None}),
    ):
        for name, value in answers.items():
            setattr(owner, name, staticmethod(_saying(value)) if isinstance(owner, type) else _saying(value))
    FakeTensorMode.avoid_device_init = True
    driver.set_active(_Driver())
    inductor.joint_graph_constant_folding = False  # which would run
    inductor.force_disable_caches = True
    inductor.use_static_cuda_launcher = False  # whose kernels are not to be looked into
    inductor.compile_threads = 1


class _Driver:
    """Triton's."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _saying(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
