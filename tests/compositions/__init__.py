"""Features of the library drawn together at random, each draw compared with the plain thing in one process."""
