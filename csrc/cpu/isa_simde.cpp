// The AVX-512 file again, its intrinsics emulated by SIMDe: its logic runs in tests on CPUs without AVX-512.
#define JACOBI_ISA jacobi_simde
#define JACOBI_SIMDE
#include "cpu/vec_avx512.h"

#include "cpu/isa_kernels.inc"
