"""Layer streaming: the repeated blocks of a model lie on a lower tier and come to the device one at a time, each for its forward, backward and update."""
