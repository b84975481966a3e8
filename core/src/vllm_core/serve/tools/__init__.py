"""Tool calls: what a request offers, and how each model family writes calls."""
