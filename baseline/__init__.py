"""What the library does, frozen at one commit, so that a change of its inside can be held against it.

    python -m baseline write PART          # freeze a part as it is now
    python -m baseline compare             # the quick parts; the exit code says whether any differs
    python -m baseline compare draws --workers 2

``signatures``: every public name with its arguments, and the public methods of classes. ``reads``: for each
class of causal language models, the bytes of its checkpoint by how they become parameters. ``refusals``:
every error that a test waits for: the function that was called, the built-in classes that callers catch it
by, the phase, the ranks that raise it, and the names in its message; its wording is free. ``draws`` and
``programs``: compositions of features and lists of calls, the draws themselves (a seed gives others once an
axis changes), with how each ended. ``mistakes``: which test notices each of benchmarks/checks/mistakes.
``size`` counts statements, names and arguments.
``figures`` are not frozen: they measure the commit of the baseline and the present tree in alternation.
"""
