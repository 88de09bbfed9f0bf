"""`lockstep up`: starts, supervises and stops the roles of one host."""
