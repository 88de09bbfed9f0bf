"""KV blocks as the scheduler sees them: what is resident or stored, kept, evicted, restored. Pure.

`manager.BlockCache` is what planner and core talk to. One file per idea:

    hashes           names of blocks and checkpoints
    block_format     what a block is in an epoch: namespace, length, bytes
    index            which blocks are known, and which copies of them exist
    match            the longest prefix that blocks hold
    recency          least recently used, in two classes
    eviction         which blocks go next
    pins             who holds references
    memory           the bound in bytes, making room, giving way to rows
    orders           what the plan in the making says about blocks
    sequence_blocks  one sequence as the cache sees it
    claims           what running sequences compute, so that others wait for it
    keeping          what of a row becomes blocks
    spilling         what goes to SSD
    restore          one order to read from SSD, and its answers
    restoring        which restores are asked for, and who waits for them
    adopting         what was read becomes resident
    admission        what a sequence reuses, and whether it waits for more
    report           what a request is told about its prefix
"""
