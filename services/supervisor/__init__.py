"""`lockstep up`: starts every role on this machine, restarts what exits, stops all in order."""
