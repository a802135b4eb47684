// _C_cuda is a library of op implementations; this makes it importable, which registers them.
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_cuda", "CUDA kernels of torch.ops.jacobi", -1, nullptr};
  return PyModule_Create(&definition);
}
