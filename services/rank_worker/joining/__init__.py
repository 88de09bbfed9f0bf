"""How a rank joins a world."""
