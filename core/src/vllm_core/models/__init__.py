"""Model architectures: one file each, plus the catalog that finds them."""
