"""The optimizer step under given choices: capture records it and the engine runs it, so both use this one implementation."""
