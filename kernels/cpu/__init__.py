"""Native CPU kernels: C++ with a C interface (`floe.h` and its like), loaded by `native.py`."""
