"""Native CPU kernels: C++ with a C interface (`floe.h`, `floe_offload.h`), loaded by `native.py`."""
