"""The block index: hashes, known blocks, prefix match."""
