"""Launchers: the ops of `vllm_core.api.ops` on the kernels of `vllm_cuda.kernels`, with the block sizes of the family."""
