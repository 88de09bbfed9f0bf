"""`lockstep bench cache`: time that the prefix cache saves, and time that it costs."""
