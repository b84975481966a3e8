"""The host CPU as a platform of vllm-core."""
