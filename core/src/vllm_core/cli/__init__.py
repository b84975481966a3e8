"""The command `vllm-core`, one file a command."""
