"""The other ranks: collective operations, signs of a peer that ended, and a limit of time."""
