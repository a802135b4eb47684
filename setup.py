"""Build of the binary modules.

``jacobi_kernels._C``     CPU ops on torch's stable ABI: one object per instruction set, chosen at run time
``jacobi_kernels._host``  CPU features and build report (pybind11, no torch headers)

No flag depends on the CPU of the build machine. ``JACOBI_SIMDE=0`` leaves the SIMDe build of the AVX-512 file out.
"""

import os
import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

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


def headers() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".inc"))


def isa_library(isa: str) -> tuple[str, dict[str, object]]:
    """One static library per instruction set: its flags must not reach any other object."""
    return f"jacobi_{isa}", {
        "sources": [f"csrc/cpu/isa_{isa}.cpp"],
        "include_dirs": ["csrc"],
        "cflags": KERNEL_FLAGS + ISA_FLAGS[isa],
        "obj_deps": {"": headers()},
    }


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
            ["csrc/module.cpp", *sorted(str(p) for p in Path("csrc/ops").glob("*.cpp")), "csrc/cpu/isa.cpp"],
            include_dirs=[str(ROOT / "csrc")],
            define_macros=[*DEFINES, ("TORCH_TARGET_VERSION", "0x020b000000000000")],
            extra_compile_args=["-std=c++20", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"],
            depends=headers(),
            py_limited_api=True,
        ),
        Pybind11Extension(
            "jacobi_kernels._host",
            ["csrc/host/host.cpp"],
            include_dirs=[str(ROOT / "csrc")],
            define_macros=DEFINES,
            extra_compile_args=["-O2"],
            depends=headers(),
            cxx_std=20,
        ),
    ],
    cmdclass={"build_ext": BuildWithKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
