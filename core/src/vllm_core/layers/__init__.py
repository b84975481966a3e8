"""Hardware-free layers, built on bound ops."""
