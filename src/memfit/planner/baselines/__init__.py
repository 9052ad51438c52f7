"""Known optima and rules on chains: the rivals our plans must beat, oracles for tests, and schedules for nested recomputation.

A chain is the only shape for which optimal recomputation is known, and what every rule of thumb assumes. Two models:

* `chain`: stages of different seconds and bytes, as in rotor. `rotor` is optimal among persistent schedules, `brute_force` tries all on short chains,
  `segment_rules` are rules of thumb, and `chain.simulate_chain` says what any list of operations comes to.
* `revolve`: equal steps and equal states, counted instead of measured.

Sources: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", Inria RR-9302 (2019), ACM TOMS (2024), https://hal.science/hal-02352969, for
rotor. Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000), https://doi.org/10.1145/347837.347846. Chen,
Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016), for the square root.
"""
