"""Reference implementations of the ops: native PyTorch, the specification in code."""
