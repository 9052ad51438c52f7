"""Front doors: what somebody has for another library already, turned into a plan and an engine of memfit.

`deepspeed`: its configuration file. What the file says is read in `memfit.dialects.deepspeed`, without torch; here it becomes optimizers, schedules
and engines.
"""
