"""`lockstep doctor`: what is wrong with these machines, and how to mend it."""
