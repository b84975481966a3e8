"""Triton kernels: device code alone. Launchers lie in `vllm_cuda.ops`, block sizes in `vllm_cuda.backends`."""
