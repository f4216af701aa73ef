"""`HookedGRPOTrainer` and what it is made of."""
