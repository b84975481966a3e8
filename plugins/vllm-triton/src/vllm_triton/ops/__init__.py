"""Launchers: the ops of `vllm_core.api.ops` on the kernels of `vllm_triton.kernels`, with the block sizes of the family."""
