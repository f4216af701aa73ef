"""`HookedGRPOTrainer` and its parts."""
