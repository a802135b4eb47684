// The kernel tables that a driver was linked with, by name. HAVE_<name> says which.
#pragma once

#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

#define DECLARE_TABLE(isa)                        \
  namespace jacobi_##isa {                        \
    jacobi::cpu::Kernels table(const char* name); \
  }
DECLARE_TABLE(scalar)
#ifdef HAVE_avx2
DECLARE_TABLE(avx2)
#endif
#ifdef HAVE_avx512
DECLARE_TABLE(avx512)
#endif

namespace jacobi::cpu {

inline Kernels chosen;
const Kernels& kernels() { return chosen; }

inline void choose_table(const std::string& name) {
  if (name == "scalar") chosen = jacobi_scalar::table("scalar");
#ifdef HAVE_avx2
  else if (name == "avx2")
    chosen = jacobi_avx2::table("avx2");
#endif
#ifdef HAVE_avx512
  else if (name == "avx512")
    chosen = jacobi_avx512::table("avx512");
#endif
  else
    throw std::runtime_error("no kernel table " + name);
}

}  // namespace jacobi::cpu
