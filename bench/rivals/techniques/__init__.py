"""One file for each rival; what a file has is said in `rivals`."""
