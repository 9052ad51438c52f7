"""A model shared out among ranks by torch's own engines: DistributedDataParallel, ZeroRedundancyOptimizer, `fully_shard`."""
