"""A model seen from outside: names, state, wrappers, blocks, adapters. No files, no loss."""
