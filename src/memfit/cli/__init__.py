"""`memfit` on the command line: one file per verb, and what they share.

Nothing here imports torch before a verb runs that needs it: help and bad arguments answer at once.
"""
