"""`lockstep bench speculation`: what drafts gain, and that they change no text."""
