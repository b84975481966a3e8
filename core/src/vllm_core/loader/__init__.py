"""Reading models: names, configs, weights, tokenizers."""
