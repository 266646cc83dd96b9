"""The network and its fast kernels."""
