"""Every private name of torch, transformers and datasets that the library touches, each with its reason.

A private name may change in any release. So each function here says which name it uses and why no public name
would do, and tests on the lowest and the newest versions (``make test-floor``, ``make test-latest``) find out
when that changes.
"""
