"""Triton kernels for NVIDIA's GPUs, compute capability 8 and later, that address shared memory themselves."""
