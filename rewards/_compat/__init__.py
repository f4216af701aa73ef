"""The functions behind `rewards.compat`."""
