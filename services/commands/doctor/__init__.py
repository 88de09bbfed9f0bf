"""`lockstep doctor`: what is wrong with hosts, cables and settings, and what to do about it.

    reading/      what commands of the system say, read into facts; pure, and never raises
    checks/       facts of one host -> findings; pure but for those that look at files and ports
    comparing.py  facts of several hosts -> findings; pure
    outputs.py    runs commands, each in a process of its own with a deadline
    gather.py     one host: runs, reads, checks
    remote.py     the other hosts: has them do the same
    command.py    the command

Nothing is changed. What cannot be checked here is said, not passed over.
"""
