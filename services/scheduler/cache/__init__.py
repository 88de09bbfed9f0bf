"""KV blocks as the scheduler sees them: what is resident or stored, kept, evicted, restored. Pure.

`manager.BlockCache` is what planner and core talk to. One file per idea:

    hashes      names of blocks and checkpoints
    index       which blocks are known, and which copies of them exist
    recency     the eviction order
    match       the longest prefix that blocks hold
    memory      the bound in bytes, and making room
    pins        who holds references
    keeping     what of a row becomes blocks
    spilling    what goes to SSD
    restoring   what comes back from there
    report      what a request is told about its prefix
"""
