"""Ways out of a budget that is too small: what could be asked for besides, tried by planning before it is told."""
