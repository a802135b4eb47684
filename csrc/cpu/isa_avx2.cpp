#define JACOBI_ISA jacobi_avx2
#include "cpu/vec_avx2.h"

#include "cpu/isa_kernels.inc"
