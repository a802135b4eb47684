"""Build of the binary modules.

``jacobi_kernels._C``       CPU ops on torch's stable ABI: one object per instruction set, chosen at run time
``jacobi_kernels._C_cuda``  the whole step as one CUDA launch, likewise; only with a CUDA torch and nvcc
``jacobi_kernels._host``    CPU features and build report (pybind11, no torch headers)

No flag depends on the CPU or the GPU of the build machine. ``JACOBI_SIMDE=0`` leaves the SIMDe build of the AVX-512
file out, ``USE_CUDA=0`` leaves _C_cuda out and ``USE_CUDA=1`` fails where it cannot be built.
``TORCH_CUDA_ARCH_LIST="9.0a"`` builds it for one kind of GPU instead of three. ``MAX_JOBS`` limits the compilers.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib


def find_toolkit() -> None:
    """Tell torch where the toolkit of the nvcc on PATH is: it takes the folder above it, but nvcc may be a wrapper."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return
    said = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    if top := re.search(r"^#\$ TOP=(.*)$", said.stderr, re.MULTILINE):
        os.environ["CUDA_HOME"] = str(Path(top[1]).resolve())


find_toolkit()  # before torch looks
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension  # noqa: E402

ROOT = Path(__file__).parent
X86 = platform.machine() in ("x86_64", "AMD64")
SIMDE = X86 and os.environ.get("JACOBI_SIMDE", "1") != "0" and Path("/usr/include/simde/x86/avx512.h").exists()

# -ffp-contract=off: a multiply and an add fuse only where the code says fma, so that every build gives the same bits.
KERNEL_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]
DEFINES = [("JACOBI_X86", "1")] * X86 + [("JACOBI_HAVE_SIMDE", "1")] * SIMDE
ISA_FLAGS = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx2",
        "-mfma",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
    ],
    "simde": ["-mavx2", "-mfma", "-Wno-psabi"],
}
BUILT_ISAS = ["scalar"] + ["avx2", "avx512"] * X86 + ["simde"] * SIMDE

BINDING_FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]
STABLE_ABI = [("TORCH_TARGET_VERSION", "0x020b000000000000")]
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-ffp-contract=off,-fvisibility=hidden"]
GPUS = ("80", "90a", "100a")


def headers() -> list[str]:
    suffixes = (".h", ".cuh", ".inc")
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


def sources(pattern: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob(pattern))


def cuda_modules() -> list[Extension]:
    """_C_cuda, where it can be built: whether there is a GPU does not matter."""
    wanted = os.environ.get("USE_CUDA", "")
    missing = ""
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is a build without CUDA"
    elif CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        missing = f"nvcc is not found: install the CUDA toolkit {torch.version.cuda} or set CUDA_HOME"
    if wanted == "0" or (missing and wanted != "1"):
        return []
    if missing:
        sys.exit(f"USE_CUDA=1, but {missing}")
    targets = [] if "TORCH_CUDA_ARCH_LIST" in os.environ else [f"-gencode=arch=compute_{g},code=sm_{g}" for g in GPUS]
    extension: Extension = CUDAExtension(
        "jacobi_kernels._C_cuda",
        [*sources("ops_cuda/*.cpp"), *sources("cuda/*.cu")],
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[*STABLE_ABI, ("USE_CUDA", None)],
        extra_compile_args={"cxx": [*BINDING_FLAGS], "nvcc": [*NVCC_FLAGS, *targets]},
        depends=headers(),
        py_limited_api=True,
    )
    return [extension]


def isa_library(isa: str) -> tuple[str, dict[str, object]]:
    """One static library per instruction set: its flags must not reach any other object."""
    return f"jacobi_{isa}", {
        "sources": [f"csrc/cpu/isa_{isa}.cpp"],
        "include_dirs": ["csrc"],
        "cflags": KERNEL_FLAGS + ISA_FLAGS[isa],
        "obj_deps": {"": headers()},
    }


class BuildLibraries(build_clib):
    """The kernel libraries beside one another: each is one long compile."""

    def build_libraries(self, libraries: list[tuple[str, dict[str, object]]]) -> None:
        build = super().build_libraries
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(lambda library: build([library]), libraries))


class BuildWithKernels(BuildExtension):
    """`build_ext` alone would not build the kernel libraries that the extension links."""

    def run(self) -> None:
        self.run_command("build_clib")
        super().run()


setup(
    libraries=[isa_library(isa) for isa in BUILT_ISAS],
    ext_modules=[
        CppExtension(
            "jacobi_kernels._C",
            ["csrc/module.cpp", *sources("ops/*.cpp"), "csrc/cpu/isa.cpp"],
            include_dirs=[str(ROOT / "csrc")],
            define_macros=[*DEFINES, *STABLE_ABI],
            extra_compile_args=[*BINDING_FLAGS],
            depends=headers(),
            py_limited_api=True,
        ),
        Pybind11Extension(
            "jacobi_kernels._host",
            sources("host/*.cpp"),
            include_dirs=[str(ROOT / "csrc")],
            define_macros=DEFINES,
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno"],
            depends=headers(),
            cxx_std=20,
        ),
        *cuda_modules(),
    ],
    cmdclass={"build_ext": BuildWithKernels, "build_clib": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
