"""Texts that settings take: host names, lists of cores, ranges of ports, overrides of a model's config.json."""
