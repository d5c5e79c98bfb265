"""Plans every step. Imports only `protocol`; never torch."""
