"""Every byte that is not on the device: in which folder, in which file or pinned memory, copied by whom, and how fast the way there is."""
