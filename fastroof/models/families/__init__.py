"""Model families: each file interprets the config.json of alike families and is found by its ``FAMILIES``."""
