// _C is a library of op implementations; this makes it importable, which registers them.
#include <Python.h>

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "CPU kernels of torch.ops.jacobi", -1, nullptr};
  return PyModule_Create(&definition);
}
