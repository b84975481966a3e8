"""A stand-in for AITER: its signatures, with arithmetic of torch. A misreading of its semantics would pass here."""
