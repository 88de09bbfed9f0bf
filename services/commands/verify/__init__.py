"""`lockstep verify`: whether a running Lockstep does all that it should."""
