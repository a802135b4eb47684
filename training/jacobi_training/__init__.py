"""Consistency training: turns a causal language model into a parallel decoder by training it on its own trajectories.

Stages, each a module and a subcommand of ``jacobi train``: ``trajectories`` (the model's own Jacobi iterates), ``pack``
(noise schedule and block layout), ``fit`` (losses and optimizer) and ``evaluate``.
"""
