"""Finding, loading, probing and choosing platforms."""
