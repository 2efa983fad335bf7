"""What the library does, frozen at one commit, so that a change of its inside can be held against it.

    python -m baseline compare             # the exit code says whether anything differs
    python -m baseline compare tape --only Llama
    python -m baseline write tape          # freeze a part as it is now

``signatures``: every public name with its arguments, and the public methods of classes. ``reads``: for each
class of causal language models, the bytes of its checkpoint by how they become parameters. ``tape``: fixed
runs, bit for bit; one that was stopped goes on. A difference that is meant gets a line with its reason in
``meant.json``.
"""
