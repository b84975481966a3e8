"""A simulated accelerator as a platform of vllm-core: the example that authors of plugins start from."""
