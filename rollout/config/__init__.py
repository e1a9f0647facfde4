"""Configuration: frozen, unknown-field-refusing structs, read from TOML."""
