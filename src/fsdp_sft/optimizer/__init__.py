"""AdamW for bfloat16 parameters with stochastic rounding, which loses no small update on average."""
