"""Turn chat rows into input_ids and labels, pad them to batches, and show which tokens are trained.

Labels are aligned with input_ids, as in Hugging Face; the shift by one happens once, in the loss.
"""
