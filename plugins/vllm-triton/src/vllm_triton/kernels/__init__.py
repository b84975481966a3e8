"""Triton kernels: device code alone. Launchers lie in `vllm_triton.ops`, block sizes in the `backends` of each platform."""
