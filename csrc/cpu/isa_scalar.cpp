#define JACOBI_ISA jacobi_scalar
#include "cpu/vec_scalar.h"

#include "cpu/isa_kernels.inc"
