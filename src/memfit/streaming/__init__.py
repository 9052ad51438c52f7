"""Layer streaming: the repeated blocks of a model are offloaded to a lower tier and loaded one at a time for their forward, backward and update."""
