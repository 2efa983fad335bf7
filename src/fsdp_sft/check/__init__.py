"""Whether a job's machines, and this library on them, are sound, and how fast they are: ``fsdp-sft check``.

Each check is one file of ``checks/``, which says its name, its seconds and what it asks (``mechanism.py``).
``sequence.py`` runs them one after the other below a watchdog, ``results.py`` puts what they found into a
table, and ``command.py`` is the command. ``environment.py`` has what ``fsdp-sft env`` shows.
"""
