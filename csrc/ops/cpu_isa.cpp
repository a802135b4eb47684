// _cpu_isa(name): the active kernel set; a name switches to it first. Without tensors, so it is no backend's op.
#include "cpu/kernels.h"
#include "ops/checks.h"

namespace jacobi::ops {
namespace {

std::string cpu_isa(std::string name) {
  if (!name.empty() && !cpu::select_kernels(name.c_str()))
    fail("_cpu_isa", "name must be one of ", cpu::available_kernels(), " on this CPU, got '", name, "'");
  return cpu::kernels().name;
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CompositeExplicitAutograd, m) { m.impl("_cpu_isa", TORCH_BOX(&cpu_isa)); }

}  // namespace
}  // namespace jacobi::ops
