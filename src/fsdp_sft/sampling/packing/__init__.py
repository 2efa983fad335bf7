"""Several rows in one sequence: packing, collation, a distributed sampler and streams.

A *row* is one conversation, a *pack* several rows joined into one sequence, and a *round* one pack for each
rank. Tokens of a row must not attend to other rows of their pack. This depends on the model, and
``verify_packing`` measures it.
"""
