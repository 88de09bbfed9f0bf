"""`lockstep bench cache`: what the prefix cache saves and costs."""
