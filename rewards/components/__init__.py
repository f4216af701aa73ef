"""Components of rewards, one module per kind of check. Import them from their module; presets combine them."""
