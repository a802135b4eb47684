// Marks a function of csrc/common as callable on host and device.
#pragma once

#if defined(__CUDACC__)
#define JACOBI_HD __host__ __device__
#else
#define JACOBI_HD
#endif
