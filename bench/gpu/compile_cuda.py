"""Offline compile of csrc/cuda and csrc/ops_cuda: needs nvcc, but no GPU and no CUDA build of torch.

Kernels (``csrc/cuda/*.cu``) are compiled for every target. The binding (``csrc/ops_cuda/*.cpp``) is compiled with the
flags of setup.py against the headers of whatever torch is installed, linked with the kernels, and loaded. A torch
without CUDA lacks the function of the stable interface that gives the current stream, so a stub stands in for it;
nothing is launched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from bench.environment import ROOT
from bench.gpu.resources import ARCHITECTURE, Compiled, Usage, mma_in_sass, parse_ptxas, tool

KERNELS = ROOT / "csrc" / "cuda"
BINDING = ROOT / "csrc" / "ops_cuda"
LINK = "link and load"
HOST_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]
DEVICE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "-Xptxas",
    "-v",
    "-Xcompiler",
    "-fPIC,-ffp-contract=off,-fvisibility=hidden",
]
LINK_TARGET = 90

STUBS = """
#include <stdint.h>
int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) { (void)device; *stream = 0; return 0; }
"""
LOAD = """
import importlib.util, sys, torch
import jacobi_kernels
spec = importlib.util.spec_from_file_location("jacobi_kernels._C_cuda", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
for op, key in (("_cooperative_step", "CUDA"), ("_cooperative_workspace_size", "CPU")):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"jacobi::{op}", key), f"{op} has no {key} implementation"
"""


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, of the path, or of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((c for c in candidates if c.exists()), None)


def cuda_home(nvcc: Path) -> Path:
    """The toolkit's folder, as nvcc itself says (it may be called through a wrapper)."""
    said = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.+)$", said.stderr, re.MULTILINE)
    return Path(top[1]).resolve() if top else nvcc.resolve().parent.parent


def kernel_files() -> list[str]:
    """Names of the kernel files, sorted."""
    return sorted(p.name for p in KERNELS.glob("*.cu"))


def compile_kernels(name: str, target: int) -> list[Compiled]:
    """Every entry function of one kernel file for one target."""
    start, group = time.perf_counter(), f"csrc/cuda/{name}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            log, sass = _compile_device(name, target, Path(folder) / "kernel.o")
    except RuntimeError as error:
        return [Compiled(group, name, target, error=str(error))]
    usages = parse_ptxas(log)
    if not usages:
        return [Compiled(group, name, target, error="has no kernel")]
    seconds = (time.perf_counter() - start) / len(usages)
    found = []
    for symbol, usage in usages.items():
        mma = mma_in_sass(sass.get(symbol, ""))
        readable = demangled(symbol)
        whole = Usage(usage.registers, usage.shared, usage.spills, mma)
        # The bfloat16 kernels multiply with matrix instructions; float32 ones with fma.
        found.append(Compiled(group, readable, target, whole, uses_mma="bfloat16" in readable, seconds=seconds))
    return found


def _nvcc(name: str, code: str, to: Path) -> str:
    """Compile one kernel file; what the compiler said."""
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS  # setup.py's build adds them

    nvcc = find_nvcc()
    assert nvcc is not None
    flags = [*DEVICE_FLAGS, *COMMON_NVCC_FLAGS, f"-gencode={code}", "-I", ROOT / "csrc"]
    return tool([nvcc, *flags, "-c", KERNELS / name, "-o", to])


def _compile_device(name: str, target: int, to: Path) -> tuple[str, dict[str, str]]:
    """(what ptxas said, disassembly of every function)."""
    from triton.backends import nvidia

    arch = ARCHITECTURE[target].removeprefix("sm_")
    log = _nvcc(name, f"arch=compute_{arch},code=sm_{arch}", to)
    disassembler = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    pieces = re.split(r"^\s*Function : (\w+)$", tool([disassembler, "--dump-sass", to]), flags=re.MULTILINE)
    return log, dict(zip(pieces[1::2], pieces[2::2], strict=True))


def demangled(symbol: str) -> str:
    """A C++ name without its arguments."""
    if shutil.which("c++filt") is None:
        return symbol
    name = tool(["c++filt", symbol]).strip().removeprefix("void ")
    return re.sub(r"\((?!anonymous).*", "", name).replace("(anonymous namespace)::", "")


def link_and_load() -> Compiled:
    """The binding with the kernels of one target, as a module that Python loads."""
    start, error = time.perf_counter(), ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _link_and_load(Path(folder))
    except RuntimeError as caught:
        error = str(caught)
    return Compiled("csrc/ops_cuda", LINK, LINK_TARGET, error=error, seconds=time.perf_counter() - start)


def _link_and_load(folder: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    nvcc = find_nvcc()
    assert nvcc is not None
    home = cuda_home(nvcc)
    includes = [ROOT / "csrc", *include_paths(), home / "include", sysconfig.get_path("include")]
    flags = [*HOST_FLAGS, "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000"]
    flags += [part for include in includes for part in ("-isystem" if include != includes[0] else "-I", str(include))]
    objects = []
    for source in sorted(BINDING.glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        tool(["g++", *flags, "-c", source, "-o", objects[-1]])
    for name in kernel_files():
        objects.append(folder / f"{name}.o")
        arch = ARCHITECTURE[LINK_TARGET].removeprefix("sm_")
        _nvcc(name, f"arch=compute_{arch},code=compute_{arch}", objects[-1])  # PTX will do, and is ready sooner
    stubs = folder / "stubs.c"
    stubs.write_text(STUBS)
    libraries = [*library_paths(), *(home / name for name in ("lib64", "lib") if (home / name).is_dir())]
    search = [part for library in libraries for part in ("-L", str(library), f"-Wl,-rpath,{library}")]
    module = folder / "_C_cuda.abi3.so"
    cudart = ["-lcudart"]
    if not any((Path(library) / "libcudart.so").exists() for library in libraries):
        cudart = ["-l:libcudart.so.13"]
    tool(["gcc", "-fPIC", "-c", stubs, "-o", folder / "stubs.o"])
    everything = ["g++", "-shared", *objects, folder / "stubs.o", *search]
    tool([*everything, "-ltorch", "-ltorch_cpu", "-lc10", *cudart, "-o", module])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(module)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the linked module does not load:\n{done.stderr.strip()}")
