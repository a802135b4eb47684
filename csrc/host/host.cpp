// _host: what is not a tensor op. CPU features, how the library was built, the decode-state columns of the C++ side.
#include <pybind11/pybind11.h>

#include "common/state.h"

namespace py = pybind11;

namespace jacobi::host {
void bind_grid_program(py::module_& m);  // grid_program.cpp
}

namespace {

py::dict cpu_features() {
  py::dict features;
#if defined(__x86_64__)
#define JACOBI_FEATURE(name) features[name] = static_cast<bool>(__builtin_cpu_supports(name))
  JACOBI_FEATURE("avx2");
  JACOBI_FEATURE("fma");
  JACOBI_FEATURE("f16c");
  JACOBI_FEATURE("avx512f");
  JACOBI_FEATURE("avx512bw");
  JACOBI_FEATURE("avx512dq");
  JACOBI_FEATURE("avx512vl");
  JACOBI_FEATURE("avx512vnni");
  JACOBI_FEATURE("avx512bf16");
#undef JACOBI_FEATURE
#endif
  return features;
}

py::dict build_report() {
  py::dict report;
  report["compiler"] = __VERSION__;
  report["cxx_standard"] = static_cast<long>(__cplusplus);
#ifdef JACOBI_HAVE_SIMDE
  report["simde"] = true;
#else
  report["simde"] = false;
#endif
  return report;
}

py::dict state_columns() {
  py::dict columns;
  columns["TEXT_LEN"] = static_cast<int>(jacobi::kTextLen);
  columns["PROMPT_LEN"] = static_cast<int>(jacobi::kPromptLen);
  columns["MAX_LEN"] = static_cast<int>(jacobi::kMaxLen);
  columns["NUM_FINAL"] = static_cast<int>(jacobi::kNumFinal);
  columns["ACTIVE"] = static_cast<int>(jacobi::kActive);
  columns["BLOCK_FILL"] = static_cast<int>(jacobi::kBlockFill);
  columns["POOL_NEXT"] = static_cast<int>(jacobi::kPoolNext);
  columns["POOL_START"] = static_cast<int>(jacobi::kPoolStart);
  columns["DONE"] = static_cast<int>(jacobi::kDone);
  columns["ACCEPTED"] = static_cast<int>(jacobi::kAccepted);
  columns["WINNER"] = static_cast<int>(jacobi::kWinner);
  columns["EMITTED"] = static_cast<int>(jacobi::kEmitted);
  columns["FIXED_POINT"] = static_cast<int>(jacobi::kFixedPoint);
  columns["ERROR"] = static_cast<int>(jacobi::kError);
  return columns;
}

py::dict step_errors() {
  py::dict errors;
  errors["NONE"] = static_cast<int>(jacobi::kNoError);
  errors["LAYOUT"] = static_cast<int>(jacobi::kLayoutError);
  errors["TOKEN"] = static_cast<int>(jacobi::kTokenError);
  errors["CACHE_LENGTH"] = static_cast<int>(jacobi::kCacheLengthError);
  errors["PAGE_TABLE"] = static_cast<int>(jacobi::kPageTableError);
  errors["STATE"] = static_cast<int>(jacobi::kStateError);
  return errors;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side facts of jacobi_kernels: CPU features, build report, decode-state columns.";
  m.def("cpu_features", &cpu_features, "Names of CPU features that the kernels ask for, each with True or False.");
  m.def("build_report", &build_report,
        "Compiler, C++ standard, and whether the SIMDe build of the AVX-512 file is in.");
  m.def("step_errors", &step_errors, "Name -> value of the state's column ERROR, as the C++ code has it.");
  m.def("state_columns", &state_columns, "Name -> column of the per-sequence decode state, as the C++ code has it.");
  jacobi::host::bind_grid_program(m);
}
