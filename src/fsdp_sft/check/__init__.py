"""Whether a job's machines, and this library on them, are sound: ``fsdp-sft check``.

A check is a function ``job -> (what was seen, problems)`` that all ranks call: ``environment``, ``products``,
``reductions``, ``network``, ``folder``, ``parity``. ``command.py`` calls them in turn and prints a table.
"""
