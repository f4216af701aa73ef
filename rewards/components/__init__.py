"""Components: one module per kind of check. Import from the module; presets put them together."""
