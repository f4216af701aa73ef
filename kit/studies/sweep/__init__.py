"""Search over any key of a configuration: Optuna proposes, every trial is a normal run, the best one is left as YAML."""
