"""Which splittings of a model are possible, and how much each rank gets. Imports no MLX."""
