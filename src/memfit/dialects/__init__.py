"""Other people's front doors: configurations and calls that people have already, read as what memfit offers for them.

`deepspeed`: the JSON configuration of DeepSpeed. `paddle`: the optimizer that recomputes, of PaddlePaddle.
"""
