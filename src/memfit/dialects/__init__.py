"""Other people's front doors: configurations and calls that people have already, read as what memfit offers for them.

`deepspeed`: the JSON configuration of DeepSpeed. `paddle`: the optimizer that recomputes, of PaddlePaddle.

What a configuration says is read without torch; what trains with it is a module of its own beside the reader.
"""
