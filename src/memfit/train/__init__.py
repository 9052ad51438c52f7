"""Train from a configuration: data, loop, learning-rate schedule, evaluation, log, snapshots.

The engine takes one optimizer step at a time and knows nothing of files; this folder has what surrounds it. Everything
here can also be used from Python: `memfit.train.loop.train(engine, batches, ...)`.
"""
