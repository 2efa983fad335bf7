"""Features of the library drawn together at random, each draw beside plain training in one process."""
