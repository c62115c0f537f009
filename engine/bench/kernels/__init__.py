"""The kernels at full width."""
