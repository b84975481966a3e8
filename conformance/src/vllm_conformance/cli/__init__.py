"""The command `vllm-core conformance`."""
