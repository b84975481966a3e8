"""Intel GPUs as a platform of vllm-core."""
