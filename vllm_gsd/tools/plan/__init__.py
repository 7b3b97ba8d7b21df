"""``vllm-gsd plan`` predicts what speculation gives at every batch size, and how many replicas a load needs.

``report`` reads what ``vllm-gsd bench`` measured. ``gpus`` makes a machine from a data sheet and ``shapes`` of models.
``acceptance`` tells how many tokens a graph gives, and ``trace`` what real requests accepted. ``model`` puts these
together by the planner's own arithmetic.
``fleet`` counts replicas. ``run`` writes JSON and a plot, or compares predictions with measurements.
"""
