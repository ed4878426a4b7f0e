"""Random cases of switches and of whole steps: each is verified, or refused at start with a clear message."""
