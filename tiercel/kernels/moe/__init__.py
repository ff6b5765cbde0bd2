"""Device code of mixtures of experts: routing, tiles of one expert, products by packed weights."""
