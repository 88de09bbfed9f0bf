"""What a process needs of its operating system: files, locks, streams, its parent."""
