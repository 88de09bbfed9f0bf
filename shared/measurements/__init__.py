"""What ranks measure at their start and in steps: names of results, and what follows from them."""
