"""A model's files: location, download, config, weight headers, and possible splittings."""
