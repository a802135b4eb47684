// Which kernel table runs: the widest that was built and that this CPU and operating system support.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"

#define JACOBI_DECLARE(isa)                       \
  namespace jacobi_##isa {                        \
    jacobi::cpu::Kernels table(const char* name); \
  }
JACOBI_DECLARE(scalar)
#ifdef JACOBI_X86
JACOBI_DECLARE(avx2)
JACOBI_DECLARE(avx512)
#endif
#ifdef JACOBI_HAVE_SIMDE
JACOBI_DECLARE(simde)
#endif

namespace jacobi::cpu {
namespace {

struct Entry {
  bool supported;
  Kernels kernels;
};

// Even making a table may take the instructions it is for.
Entry entry(bool supported, Kernels (*table)(const char*), const char* name) {
  return {supported, supported ? table(name) : Kernels{}};
}

// Widest first; SIMDe is for tests and never chosen by itself. __builtin_cpu_supports also asks the operating system
// (XCR0) whether it saves the registers.
Entry* entries(int* count) {
  static Entry list[] = {
#ifdef JACOBI_X86
      entry(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
            jacobi_avx512::table, "avx512"),
      entry(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), jacobi_avx2::table, "avx2"),
#endif
      entry(true, jacobi_scalar::table, "scalar"),
#ifdef JACOBI_HAVE_SIMDE
      entry(true, jacobi_simde::table, "simde"),
#endif
  };
  *count = sizeof list / sizeof list[0];
  return list;
}

const Kernels* find(const char* name) {
  int count;
  Entry* list = entries(&count);
  for (int i = 0; i < count; ++i)
    if (list[i].supported && (name == nullptr || strcmp(list[i].kernels.name, name) == 0)) return &list[i].kernels;
  return nullptr;
}

const Kernels* choose_at_load() {
  const char* wanted = getenv("JACOBI_CPU_ISA");
  if (wanted == nullptr || wanted[0] == 0) return find(nullptr);
  if (const Kernels* found = find(wanted)) return found;
  fprintf(stderr, "jacobi_kernels: JACOBI_CPU_ISA=%s is not available here (%s); using %s\n", wanted,
          available_kernels(), find(nullptr)->name);
  return find(nullptr);
}

const Kernels*& active() {
  static const Kernels* table = choose_at_load();
  return table;
}

}  // namespace

const Kernels& kernels() { return *active(); }

bool select_kernels(const char* name) {
  const Kernels* found = find(name);
  if (found != nullptr) active() = found;
  return found != nullptr;
}

const char* available_kernels() {
  static char names[64];
  if (names[0] == 0) {
    int count;
    Entry* list = entries(&count);
    for (int i = 0; i < count; ++i)
      if (list[i].supported) {
        if (names[0] != 0) strcat(names, ",");
        strcat(names, list[i].kernels.name);
      }
  }
  return names;
}

}  // namespace jacobi::cpu
