"""Triton kernels for NVIDIA GPUs of compute capability 8 and later that address shared memory explicitly."""
