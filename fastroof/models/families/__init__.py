"""Model families: each file interprets one family's config.json and is found by its ``FAMILIES``."""
