"""Triton kernels of vllm-core's ops, shared by the platforms whose compilers speak Triton."""
