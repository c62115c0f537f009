"""Native CPU kernels: C++ with a C interface (`floe.h`), loaded by `native.py`."""
