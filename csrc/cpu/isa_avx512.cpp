#define JACOBI_ISA jacobi_avx512
#include "cpu/vec_avx512.h"

#include "cpu/isa_kernels.inc"
