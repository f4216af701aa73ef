"""The sections of a run's configuration, one file each. `kit.config` puts them together."""
