"""Every byte that is offloaded: the folder, the files and pinned memory, the threads and streams that copy, and the measured speed of the links."""
