"""The optimizer step and the ways to run it: capture writes it down, the engine runs it, so both must be given the very same one."""
