"""The training service: runs are submitted to it, planned, queued, trained inside their predicted bytes, watched, and found again when it comes back.

`memfit serve` starts one; `memfit submit` and `memfit runs` ask it, and so does `memfit.service.client.Client`. It stands on `memfit.runner`, and never imports
torch or the code of a run into its own process. Needs `pip install 'memfit[service]'`.
"""
